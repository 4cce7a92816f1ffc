"""Rules that the bodies of all protocols share: strict types, no unknown fields, and the classes of fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import DictSchema

from jpaged.server.errors import ApiError, shortened
from jpaged.validation import whole

Reasons = Mapping[str, str]
"""Names of fields, or of kinds of items, with the reason for the caller."""


@dataclass(frozen=True, kw_only=True)
class FieldClasses:
    """The fields of one object that are not applied.

    Attributes:
        without_effect, not_honoured, refused: see the module. The value false asks for nothing.
        items: for a field that is a list, the kinds of its items that are not honoured. An item's kind is its `type`,
            or the item itself if it is text. A kind with the reason "" has no effect.
    """

    without_effect: Reasons = field(default_factory=dict)
    not_honoured: Reasons = field(default_factory=dict)
    refused: Reasons = field(default_factory=dict)
    items: Mapping[str, Reasons] = field(default_factory=dict)


NOTHING = FieldClasses()
_STOPPING = {"list"} | ({"dict"} if "fail_fast" in DictSchema.__annotations__ else set())
"""Kinds of values whose validation can end at the first error; objects can with pydantic 2.12 and later."""


def _end_at_first_error(schema: Any) -> None:
    """Let each list of a schema report its first wrong item only: of a million, pydantic would build them all."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if str(part.get("type")) in _STOPPING:
                part["fail_fast"] = True
            waiting += [value for value in part.values() if isinstance(value, dict | list | tuple)]
        elif isinstance(part, list | tuple):
            waiting += part


class Body(BaseModel):
    """An object in a request.

    Attributes:
        classes: fields that the server knows but does not apply.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    classes: ClassVar[FieldClasses] = NOTHING
    _unhonoured: dict[str, str] = PrivateAttr(default_factory=dict)
    _places: dict[str, list[int]] = PrivateAttr(default_factory=dict)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_at_first_error(schema)
        return schema

    @classmethod
    def _prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return an object in the form that the class's fields have."""
        return data

    @model_validator(mode="wrap")
    @classmethod
    def _given(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Sort the fields into their classes; null counts as absent."""
        if not isinstance(data, dict):
            return handler(data)
        classes, unhonoured, places = cls.classes, {}, {}
        given = {name: value for name, value in cls._prepared(data).items() if value is not None}
        names = _names(cls)
        for name in [name for name in given if name not in names]:
            if name in classes.refused and given[name] is not False:
                raise _field_error("refused_field", name, classes.refused[name])
            if name in classes.not_honoured:
                if given[name] is not False:
                    unhonoured[name] = classes.not_honoured[name]
            elif name not in {**classes.without_effect, **classes.refused}:
                raise _field_error("unknown_field", name, _nearest(cls, name))
            del given[name]
        for name, kinds in classes.items.items():
            if isinstance(items := given.get(name), list):
                places[name] = [i for i, item in enumerate(items) if _kind(item) not in kinds]
                given[name] = [items[i] for i in places[name]]
                first = {kind: i for i, item in reversed([*enumerate(items)]) if (kind := _kind(item)) in kinds}
                unhonoured |= {f"{name}.{i}": f"{kind}: {kinds[kind]}" for kind, i in first.items() if kinds[kind]}
        given |= {name: _as_integers(given[name]) for name in _of_integers(cls) & given.keys()}
        try:
            body = handler(given)
        except ValidationError as error:
            raise _placed(error, places) from error
        body._unhonoured, body._places = unhonoured, places
        return body

    def place(self, name: str, index: int) -> int:
        """Return where an item of a list stood in the request, which may have items that were left out."""
        places = self._places.get(name)
        return index if places is None else places[index]


def _placed(error: ValidationError, places: Mapping[str, Sequence[int]]) -> ValidationError:
    """Return an error whose places count the items that were left out of lists before the validation."""

    def moved(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for i in (1, 2):  # pydantic may name an alternative of a union before the index
            if i < len(loc) and isinstance(at := loc[i], int) and at < len(known := places.get(str(loc[0]), ())):
                return (*loc[:i], known[at], *loc[i + 1 :])
        return loc

    if all(not kept or len(kept) == kept[-1] + 1 for kept in places.values()):  # nothing before an item was left out
        return error
    lines = [
        InitErrorDetails(
            type=PydanticCustomError(each["type"], each["msg"], each.get("ctx")),
            loc=moved(each["loc"]),
            input=each["input"],
        )
        for each in error.errors()
    ]
    return ValidationError.from_exception_data(error.title, lines)


@cache
def _names(kind: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@cache
def _of_integers(kind: type[Body]) -> frozenset[str]:
    """Return the fields that are integers or have lists of them."""

    def holds(annotation: Any) -> bool:
        return annotation is int or any(map(holds, get_args(annotation)))

    return frozenset(field.alias or name for name, field in kind.model_fields.items() if holds(field.annotation))


def _as_integers(value: Any, levels: int = 2) -> Any:
    """Return a value with its whole floats as ints, also those in as many levels of lists as prompts have."""
    if levels and isinstance(value, list):
        kinds = set(map(type, value))
        return [_as_integers(each, levels - 1) for each in value] if kinds & {float, list} else value
    return whole(value)


def _field_error(kind: str, name: str, reason: str) -> PydanticCustomError:
    # pydantic cannot encode a lone surrogate of a name
    return PydanticCustomError(kind, "{reason}", {"field": shortened(name), "reason": reason})


def _nearest(kind: type[Body], name: str) -> str:
    """Return the name of a field that an unknown one may stand for, or "": rather one with all its words."""
    known = (*_names(kind), *kind.classes.without_effect, *kind.classes.not_honoured)
    words = set(name[:80].split("_"))
    longer = [one for one in known if words < set(one.split("_"))]
    return next(iter(get_close_matches(name[:80], longer, 1) or get_close_matches(name[:80], known, 1)), "")


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else item
    return kind if isinstance(kind, str) else ""


def unhonoured(body: Body, where: str = "") -> dict[str, str]:
    """Return the paths of fields of a request that are accepted but not honoured, each with its reason."""
    found = {f"{where}{name}": reason for name, reason in body._unhonoured.items()}
    for name, value in body.__dict__.items():
        if isinstance(value, Body):
            found |= unhonoured(value, f"{where}{name}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Body):
                    found |= unhonoured(item, f"{where}{name}.{body.place(name, i)}.")
    return found


def at_most(most: int) -> BeforeValidator:
    """Return a validator that refuses a list or object with more entries, before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"it has {len(value)} entries, the limit is {most}")
        return value

    return BeforeValidator(check)


def only_fields(body: Body, fields: Collection[str], where: str, what: str) -> None:
    """Refuse fields that have no meaning in an object of this kind, though its class has them.

    Args:
        where: the object's place in the request.
        what: the object's kind, for the message.

    Raises:
        ApiError: the object has another field.
    """
    for name in sorted(body.model_fields_set - set(fields)):
        alias = type(body).model_fields[name].alias or name
        raise ApiError(f"{where}.{alias} has no meaning in {what}", param=f"{where}.{alias}", code="invalid_value")

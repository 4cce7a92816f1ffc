"""Fields and rules that bodies share: strict types, no unknown fields, and the sampling parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import DictSchema

from jpaged import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from jpaged.server.errors import ApiError, refused, shortened
from jpaged.server.protocol.field_classes import NOTHING, SAMPLING, STREAM_OPTIONS, FieldClasses
from jpaged.validation import whole

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


MOST_CHOICES = 128
"""Limit on the outputs of one prompt, as in OpenAI's API."""
MOST_BIASES = 1024
"""Limit on the tokens of `logit_bias`: the sizes of more are compiled while all requests wait."""
MOST_TEXTS = 1024
"""Limit on the texts of `stop` and of `bad_words`, each of which is looked for after every token."""
MOST_TOKEN_IDS = 2**18
"""Limit on the tokens of `allowed_token_ids` and `stop_token_ids`, as many as the largest vocabularies have."""
_SAME_NAME = (
    "frequency_penalty",
    "presence_penalty",
    "max_tokens",
    "n",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)
_BEAM = {"n", "max_tokens", "length_penalty", "early_stopping", "ignore_eos", "temperature"}
"""Fields that a beam search uses."""
_MAY_BE_FALSE = {"stream", "logprobs", "include_stop_str_in_output"}
"""Fields whose value false a beam search accepts."""


class StreamOptions(Body):
    """Options of a stream.

    Attributes:
        include_usage: whether a last chunk has the usage.
        continuous_usage_stats: whether every chunk has it (vLLM's).
    """

    classes: ClassVar[FieldClasses] = STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """A schema and its name. The description has no effect, since the model does not see the schema."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The shape of an answer: "text", "json_object" or "json_schema".

    Attributes:
        schema_: the schema of a "json_object", as llama.cpp and others have it.
    """

    type: str
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> ResponseFormat:
        allowed = {"text": {"type"}, "json_object": {"type", "schema_"}, "json_schema": {"type", "json_schema"}}
        if self.type in allowed:
            only_fields(self, allowed[self.type], "response_format", f"a format of the type {self.type!r}")
        return self

    def shape(self) -> StructuredOutputsParams | None:
        """Return the engine's form of the shape.

        Raises:
            ApiError: the type is unknown, or its schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object" and self.schema_ is None:
            return StructuredOutputsParams(json_object=True)
        if self.type == "json_object":
            return StructuredOutputsParams(json=self.schema_)
        if self.type != "json_schema":
            message = f"response_format.type={self.type!r} is not one of text, json_object, json_schema"
            raise ApiError(message, param="response_format.type", code="invalid_value")
        if self.json_schema is None or not isinstance(self.json_schema.schema_, dict):
            schema = None if self.json_schema is None else self.json_schema.schema_
            raise ApiError(
                f"response_format.json_schema.schema={schema!r} must be a JSON schema",
                param="response_format.json_schema",
                code="invalid_value",
            )
        return StructuredOutputsParams(json=self.json_schema.schema_)


class Structure(Body):
    """The shape of a text; see `jpaged.StructuredOutputsParams`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def shape(self) -> StructuredOutputsParams:
        """Return the engine's form of the shape."""
        return StructuredOutputsParams(**self.model_dump(exclude_unset=True, by_alias=True))


class SamplingFields(Body):
    """Fields of all generating requests, with the meaning of `jpaged.SamplingParams`. Those that OpenAI lacks are
    vLLM's."""

    classes: ClassVar[FieldClasses] = SAMPLING

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], at_most(MOST_BIASES)] | None = None
    max_tokens: int | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: Annotated[str | list[str] | None, at_most(MOST_TEXTS)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = Field(None, max_length=256)
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int] | None, at_most(MOST_TOKEN_IDS)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: Annotated[list[int] | None, at_most(MOST_TOKEN_IDS)] = None
    bad_words: Annotated[list[str] | None, at_most(MOST_TEXTS)] = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, min_length=1)
    structured_outputs: Structure | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: bool | None = None
    return_token_ids: bool = False

    @property
    def sent_as(self) -> Mapping[str, str]:
        """Return the client's names, or paths, of the parameters that have others in `SamplingParams`."""
        names = {"beam_width": "n"}
        if self.structured_outputs is not None:
            return names | {kind: f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")}
        if self.response_format is None:
            return names
        path = "response_format.json_schema.schema" if self.response_format.json_schema else "response_format.schema"
        return names | {"json": path, "grammar": path}  # a grammar is what a schema becomes after a thought

    def refusal(self, error: Exception) -> ApiError:
        """Return the error for a value that jpaged refuses, by the names that the client sent."""
        return refused(error, type(self).model_fields, self.sent_as)

    def sampling_params(self, defaults: SamplingParams, **extra: Any) -> SamplingParams:
        """Return the engine's parameters.

        Args:
            defaults: values of fields that the request lacks.
            extra: values that override both.

        Raises:
            ApiError: a value is refused; the error names the field.
        """
        self._check()
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAME_NAME if name in self.model_fields_set}
        if given.get("top_p") == 0:  # the most likely token alone
            given |= {"top_p": 1.0, "temperature": 0.0}
        if self.seed is not None:
            given["seed"] = self.seed % 2**63  # OpenAI's may be negative
        if self.logit_bias is not None:
            given["logit_bias"] = {_token(text): bias for text, bias in self.logit_bias.items()}
        given["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        try:
            if "structured_outputs" not in extra and (shape := self.shape()) is not None:
                given["structured_outputs"] = shape
            return replace(defaults, **(given | extra))
        except (ValueError, TypeError) as error:
            raise self.refusal(error) from error

    def beam_params(self, most_tokens: int) -> BeamSearchParams:
        """Return the parameters of a beam search of `n` beams.

        Args:
            most_tokens: tokens of an output if the request sets no limit.

        Raises:
            ApiError: a field has no meaning in a beam search, or a value is refused.
        """
        self._check()
        useless = {*_SAME_NAME, "seed", "logit_bias", "stream", "structured_outputs", "response_format", "logprobs"}
        for name in sorted((useless - _BEAM) & self.model_fields_set):
            if name not in _MAY_BE_FALSE or getattr(self, name) is not False:
                raise ApiError(f"{name} has no meaning with use_beam_search=true", param=name, code="invalid_value")
        given = {name: getattr(self, name) for name in _BEAM & self.model_fields_set}
        given |= {"beam_width": given.pop("n", 1), "max_tokens": given.get("max_tokens", most_tokens)}
        try:
            return BeamSearchParams(**given)
        except ValueError as error:
            raise self.refusal(error) from error

    def _check(self) -> None:
        """Refuse fields that need another one."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream=true", param="stream_options", code="invalid_value")
        if not self.use_beam_search:
            for name in {"length_penalty", "early_stopping"} & self.model_fields_set:
                raise ApiError(f"{name} needs use_beam_search=true", param=name, code="invalid_value")
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise ApiError(
                "stream_options.continuous_usage_stats needs include_usage=true",
                param="stream_options.continuous_usage_stats",
                code="invalid_value",
            )

    @property
    def has_shape(self) -> bool:
        """Tell whether the text has a shape."""
        return self.structured_outputs is not None or (
            self.response_format is not None and self.response_format.type != "text"
        )

    def shape(self) -> StructuredOutputsParams | None:
        """Return the shape that the request asks of the answer's text; None if it asks for none.

        Raises:
            ApiError, ValueError, TypeError: the shape is invalid, or the request has two.
        """
        by_format = None if self.response_format is None else self.response_format.shape()
        if self.structured_outputs is None:
            return by_format
        if by_format is not None:
            raise ValueError("structured_outputs and response_format are two shapes for one text: give one of them")
        return self.structured_outputs.shape()


def _token(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        message = f"logit_bias has the key {text[:40]!r}, which is not a token id"
        raise ApiError(message, param="logit_bias", code="invalid_value")
    return int(text)


def check_model(model: str | None, names: Collection[str]) -> None:
    """Check that the server has a model; None stands for its only one.

    Raises:
        ApiError: 404.
    """
    if model is not None and model not in names:
        raise ApiError(
            f"The model `{shortened(model)}` does not exist; this server has {', '.join(names)}",
            status=404,
            param="model",
            code="model_not_found",
        )

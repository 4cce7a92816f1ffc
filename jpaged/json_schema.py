"""Rewrites JSON schemas for llguidance, which knows a part of their keywords.

Formats that it does not know are annotations, as the standard allows. Parts that nest deeper than its reader of JSON
takes become definitions; references to definitions that nothing satisfies become schemas that nothing does. Where an
object may have other names than listed ones, no text has ``\\u`` in it. A schema that need not be followed strictly
loses the keywords that cannot be followed; those of a strict one are refused by name.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from jpaged.json_numbers import follow_decimals, narrow_bounds, unfollowed_step
from jpaged.json_patterns import rust_pattern

VALUES = frozenset(("enum", "const", "default", "example", "examples"))
"""Keywords of a schema that hold values, not schemas."""
NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose objects have names for keys, not keywords."""
DEFINITIONS = ("$defs", "definitions")
"""Keywords whose objects have the schemas that references point at."""
_OF_DEFINITION = re.compile(r"#/(?:\$defs|definitions)/[^/]+")
"""References to definitions."""
_OF_THE_WHOLE = frozenset((*DEFINITIONS, "x-guidance"))
"""Keywords that a schema has only once, at its top."""
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_NOT_FOLLOWED = frozenset(
    (
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("propertyNames", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("not", "if", "then", "else", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that llguidance does not follow."""
_LOOKS = re.compile(r"\\[bBZAzG1-9k]|\\.|\(\?(?:[=!>]|<[=!])", re.DOTALL)
"""Escapes and groups; those that Rust's regular expressions lack are the ones that `_is_unknown` names."""
_DECIMAL = "^(?!^[-+.]*$)"
"""The beginning of pydantic's pattern of a Decimal: the text has more than signs and a point."""
_DECIMAL_DIGITS = re.compile(r"\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)")
"""Its bound on all digits, which those on the digits before and after the point imply."""
NO_LENGTH = 2**31
"""No text of a model is as long, so a limit of it has no effect; the compiler's numbers end near it."""
_LENGTHS = frozenset(("maxLength", "maxItems", "maxProperties"))
MOST_NESTED = 100
"""Levels of lists and objects in a schema, as llguidance's reader of JSON takes 127 with what stands around it."""
_MOVED_EVERY = 25
"""Levels after which a part of a deeper schema becomes a definition."""
LENIENT = {"lenient": True}
"""llguidance's option that leaves out keywords which are not followed and not known here."""
_NO_CODES = {"json_allowed_escapes": 'nrbtf\\"'}
"""llguidance's option for texts without ``\\u``, in which no name can be written as another one. They then have no
control characters but those with a short escape, as ``\\n``."""
_CODE = re.compile(r"\\u00[01]|\x7f")
"""Such a character, as Python writes it in JSON."""
_NOTHING: dict[str, Any] = {"enum": []}
"""A schema that nothing satisfies."""


def followable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without unknown formats and with patterns and unions in forms that can be followed; its meaning
    is the same."""
    return _rewritten(schema, _plain)


def followed_as_far_as_can_be(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without the keywords that cannot be followed, and with `oneOf` as `anyOf`."""

    def change(node: dict[str, Any]) -> None:
        _plain(node)
        for keyword in _NOT_FOLLOWED & node.keys():
            del node[keyword]
        if isinstance(branches := node.pop("oneOf", None), list):
            node.setdefault("anyOf", branches)
        if _is_unfollowed_pattern(node.get("pattern")):
            del node["pattern"]
        if unfollowed_step(node) is not None:
            del node["multipleOf"]
        named = node.get("patternProperties")
        if isinstance(named, Mapping) and any(map(_is_unfollowed_pattern, named)):
            node["patternProperties"] = {key: value for key, value in named.items() if not _is_unfollowed_pattern(key)}
            if node.get("additionalProperties") is False:
                del node["additionalProperties"]  # it would forbid the names that the pattern allows

    return _rewritten(schema, change)


def first_unfollowed(schema: Mapping[str, Any]) -> str | None:
    """Return a keyword that cannot be followed, with its value where that is short; None if there is none."""
    found: list[str] = []

    def look(node: dict[str, Any]) -> None:
        _plain(node)
        found.extend(sorted(_NOT_FOLLOWED & node.keys())[:1])
        patterns = [node.get("pattern"), *(node["patternProperties"] if _has_names(node) else ())]
        found.extend(f"pattern {_short(pattern)}" for pattern in patterns if _is_unfollowed_pattern(pattern))
        if (step := unfollowed_step(node)) is not None:
            found.append(f"multipleOf {step}")

    _rewritten(schema, look)
    return found[0] if found else None


def _has_names(node: Mapping[str, Any]) -> bool:
    return isinstance(node.get("patternProperties"), Mapping)


def _short(text: str) -> str:
    return repr(text if len(text) <= 30 else f"{text[:30]}...")


def _plain(node: dict[str, Any]) -> None:
    """Give one object of a schema an equivalent form that can be followed."""
    if isinstance(node.get("format"), str) and node["format"] not in _FORMATS:
        del node["format"]
    if isinstance(node.get("oneOf"), list) and "discriminator" in node and "anyOf" not in node:
        node["anyOf"] = node.pop("oneOf")  # a discriminator names one branch, so no value fits two
    narrow_bounds(node)
    for keyword in _LENGTHS & node.keys():
        if type(node[keyword]) is int and node[keyword] >= NO_LENGTH:
            del node[keyword]
    pattern = node.get("pattern")
    if isinstance(pattern, str) and pattern.startswith(_DECIMAL) and isinstance(node.get("allOf", []), list):
        node["pattern"] = "^" + _DECIMAL_DIGITS.sub("", pattern.removeprefix(_DECIMAL))
        node["allOf"] = [*node.get("allOf", []), {"pattern": "[0-9]"}]
    if isinstance(node.get("pattern"), str):
        node["pattern"] = rust_pattern(node["pattern"])
    if isinstance(node.get("patternProperties"), Mapping):
        named: dict[str, Any] = {}
        for key, value in node["patternProperties"].items():
            same = rust_pattern(key)
            named[same] = {"allOf": [named[same], value]} if same in named else value
        node["patternProperties"] = named


def _is_unfollowed_pattern(pattern: Any) -> bool:
    return isinstance(pattern, str) and any(_is_unknown(found[0]) for found in _LOOKS.finditer(pattern))


def _is_unknown(part: str) -> bool:
    return part.startswith("(") or part[1] in "bBZAzG123456789k"


def _rewritten(schema: Mapping[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return a copy of a schema, each object of which `change` was given; without recursion, as schemas nest deep."""
    root = dict(schema)
    waiting: list[tuple[dict[str, Any], bool]] = [(root, False)]
    while waiting:
        node, has_names = waiting.pop()
        if not has_names:
            change(node)
        for key, value in node.items():
            if not has_names and key in VALUES:
                continue
            if isinstance(value, Mapping):
                node[key] = copied = dict(value)
                waiting.append((copied, not has_names and key in NAMES))
            elif isinstance(value, list):
                node[key] = [dict(each) if isinstance(each, Mapping) else each for each in value]
                waiting += [(each, False) for each in node[key] if isinstance(each, dict)]
    parts = [part for part, *_ in _parts(root)]
    for part in parts:
        follow_decimals(part)
    _close_references(root)
    flat = _flat(root)
    if any(map(_has_other_names, parts)) and not any(map(_needs_codes, parts)):
        given = flat.get("x-guidance")
        flat["x-guidance"] = {**_NO_CODES, **(given if isinstance(given, Mapping) else {})}
    return flat


def names_apart(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return llguidance's options, of those that rewritten schemas have, for a schema that they are put into."""
    options = [schema.get("x-guidance") for schema in schemas]
    return _NO_CODES if any(isinstance(each, Mapping) and each.items() >= _NO_CODES.items() for each in options) else {}


def _has_other_names(part: Mapping[str, Any]) -> bool:
    """Tell whether a schema's object may have other names than listed ones.

    llguidance takes ``{"\\u0061": ...}`` for another name than ``a``.
    """
    return part.get("additionalProperties") is not False and any(
        part.get(keyword) for keyword in ("properties", "required", "patternProperties")
    )


def _needs_codes(part: Mapping[str, Any]) -> bool:
    """Tell whether a text of the schema may have to have a control character without a short escape."""
    return any(_CODE.search(json.dumps(part[keyword])) for keyword in ("enum", "const") if keyword in part)


def _close_references(root: dict[str, Any]) -> None:
    """Make references to what nothing satisfies schemas that nothing does: llguidance refuses the whole for such."""
    parts = [part for part, *_ in _parts(root)]
    if _has_bases(parts):
        return
    aims = {id(part): pointed_at(root, part["$ref"]) for part in parts if isinstance(part.get("$ref"), str)}
    closed = _unsatisfied(aims)
    for part in parts:
        if id(part) in aims and ((aim := aims[id(part)]) is False or id(aim) in closed):
            part.clear()
            part |= _NOTHING


def _unsatisfied(aims: Mapping[int, Any]) -> set[int]:
    """Return the definitions, by their Python ids, that no value of finite length satisfies.

    A definition is satisfied if it is with those that were found to be before; one that needs itself never is.

    Args:
        aims: the target of each schema with a reference, by its id.
    """
    definitions = {id(aim): aim for aim in aims.values() if isinstance(aim, dict)}
    users: dict[int, set[int]] = {at: set() for at in definitions}
    for at, each in definitions.items():
        for part, *_ in _parts(each):
            if id(part) in aims and id(aims[id(part)]) in users:
                users[id(aims[id(part)])].add(at)
    closed = set(definitions)
    due = deque(reversed(definitions))  # references mostly point further down
    queued = set(due)
    while due:
        queued.remove(at := due.popleft())
        if _may_be_satisfied(definitions[at], aims, closed.__contains__):
            closed.remove(at)
            again = [user for user in users[at] if user in closed and user not in queued]
            due += again
            queued.update(again)
    return closed


def _may_be_satisfied(definition: dict[str, Any], aims: Mapping[int, Any], is_closed: Callable[[int], bool]) -> bool:
    """Tell whether llguidance finds values of a definition, of whose references some are closed and the others open."""
    if _levels(definition) > MOST_NESTED:
        return True
    needed: set[Any] = set()
    for part, *_ in _parts(definition):
        if isinstance(names := part.get("required"), list):
            needed.update(name for name in names if isinstance(name, str))
        if "minProperties" in part and isinstance(names := part.get("properties"), Mapping):
            needed.update(names)

    def standing(value: Any, has_names: bool = False) -> Any:
        if isinstance(value, list):
            return [standing(each) for each in value]
        if not isinstance(value, dict):
            return value
        if not has_names and id(value) in aims:
            aim = aims[id(value)]
            if aim is False or is_closed(id(aim)):
                return _NOTHING
        kept = {}
        for key, each in value.items():
            if has_names or key not in ("$ref", "$defs", "definitions", *VALUES):
                if key == "properties" and not has_names and isinstance(each, Mapping):
                    each = {name: schema for name, schema in each.items() if name in needed}
                kept[key] = standing(each, not has_names and key in NAMES)
            elif key in ("enum", "const"):
                kept[key] = each
        return kept

    from llguidance import LLMatcher

    schema = standing(definition)
    if schema.keys() <= {"type", "title", "description"}:
        return True
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return not error.startswith("Unsatisfiable schema")


def _flat(root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose parts that nest deep are definitions, with references in their places.

    Raises:
        ValueError: a value such as a `const` nests deep, or parts cannot be moved because of `$id` or of references
            into values.
    """
    levels = _levels(root)
    if levels <= MOST_NESTED:
        return root
    parts = list(_parts(root))
    aims = {id(part): pointed_at(root, part["$ref"]) for part, *_ in parts if isinstance(part.get("$ref"), str)}
    known = {id(part) for part, *_ in parts}
    if _has_bases([part for part, *_ in parts]) or any(id(aim) not in known for aim in aims.values()):
        raise ValueError(
            f"a schema with $id, or with references to values, nests {levels} levels deep, the limit is {MOST_NESTED}"
        )
    referred = {id(aim) for aim in aims.values()}
    definitions: dict[str, Any] = {}
    moved = {id(root): "#"}
    begins = {id(root): 0}  # the level of the definition that holds a part
    for part, holder, container, key, level in parts[1:]:
        begins[id(part)] = begins[id(holder)]
        if id(part) in referred or level - begins[id(holder)] >= _MOVED_EVERY:
            name = _free_name("jpaged-part", len(definitions), root)
            moved[id(part)], begins[id(part)] = f"#/$defs/{name}", level
            definitions[name] = part
            container[key] = {"$ref": f"#/$defs/{name}"}
    for part, *_ in parts:
        if id(part) in aims:
            part["$ref"] = moved[id(aims[id(part)])]
    own = root.get("$defs")
    flat = root | {"$defs": (own if isinstance(own, dict) else {}) | definitions}
    if (left := _levels(flat)) > MOST_NESTED:
        raise ValueError(f"a value in a schema nests {left} levels deep, the limit is {MOST_NESTED}")
    return flat


def with_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """Make the references in a schema point at its definitions, and return it.

    A part that is cut out then needs the definitions alone. The whole is one of them where a part refers to it.
    References that cannot be resolved stay.
    """
    parts = [part for part, *_ in _parts(schema)]
    if _has_bases(parts):
        return schema
    names: dict[int, str] = {}
    definitions: dict[str, Any] = {}
    for part in parts:
        reference = part.get("$ref")
        if not isinstance(reference, str) or _OF_DEFINITION.fullmatch(reference):
            continue
        if (aim := pointed_at(schema, reference)) is None:
            continue
        if id(aim) not in names:
            names[id(aim)] = name = _free_name("jpaged-aim", len(names), schema)
            is_whole = aim is schema
            definitions[name] = {k: v for k, v in aim.items() if k not in _OF_THE_WHOLE} if is_whole else aim
        part["$ref"] = f"#/$defs/{names[id(aim)]}"
    if definitions:
        own = schema.get("$defs")
        schema["$defs"] = (own if isinstance(own, dict) else {}) | definitions
    return schema


def _free_name(name: str, number: int, root: Mapping[str, Any]) -> str:
    """Return a name with a number that no definition of a schema has; another number never gets the same."""
    own = root.get("$defs")
    made = f"{name}-{number}"
    while isinstance(own, dict) and made in own:
        made += "-"
    return made


def _has_bases(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether parts of a schema, whose first is the whole, have names that references may be relative to."""
    return any(isinstance(part.get(key), str) for part in parts[1:] for key in ("$id", "id", "$anchor"))


def _parts(root: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any, Any, Any, int]]:
    """Yield the schemas in a schema: each with the one that holds it, its container and key, and its level."""
    waiting: list[tuple[dict[str, Any], Any, Any, Any, int]] = [(root, None, None, None, 1)]
    while waiting:
        yield (found := waiting.pop())
        part, level = found[0], found[4]
        for key, value in part.items():
            if key in VALUES:
                continue
            if isinstance(value, dict) and key not in NAMES:
                waiting.append((value, part, part, key, level + 1))
            elif isinstance(value, dict | list):
                each = value.items() if isinstance(value, dict) else enumerate(value)
                waiting += [(inner, part, value, at, level + 2) for at, inner in each if isinstance(inner, dict)]


def _levels(value: Any) -> int:
    """Return how deep the lists and objects of a value nest."""
    levels, here = 0, [value]
    while here := [each for each in here if isinstance(each, Mapping | list)]:
        levels += 1
        here = [inner for each in here for inner in (each.values() if isinstance(each, Mapping) else each)]
    return levels


def pointed_at(schema: Any, reference: str) -> Any:
    """Return the target of a JSON pointer in the schema; None if it has none, or if it cannot be resolved."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    value = schema
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        else:
            value = value[int(key)] if isinstance(value, list) and key.isdecimal() and int(key) < len(value) else None
    return value

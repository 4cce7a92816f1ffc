"""Rewrites JSON schemas for llguidance, which knows a part of their keywords.

Formats that it does not know are annotations, as the standard allows. A schema that need not be followed strictly loses
the keywords that cannot be followed; those of a strict one are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

VALUES = frozenset(("enum", "const", "default", "example", "examples"))
"""Keywords of a schema that hold values, not schemas."""
NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose objects have names for keys, not keywords."""
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
LENIENT = {"lenient": True}
"""llguidance's option that leaves out keywords which are not followed and not known here."""


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
    pattern = node.get("pattern")
    if isinstance(pattern, str) and pattern.startswith(_DECIMAL) and isinstance(node.get("allOf", []), list):
        node["pattern"] = "^" + _DECIMAL_DIGITS.sub("", pattern.removeprefix(_DECIMAL))
        node["allOf"] = [*node.get("allOf", []), {"pattern": "[0-9]"}]


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
    return root

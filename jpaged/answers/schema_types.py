"""Looks up what a JSON schema says about one argument: its schema, and the types of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.json_schema import pointed_at

_MOST_STEPS = 20
"""References that are followed after each other; a circle has no end."""
_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema, or what its reference points at."""
    for _ in range(_MOST_STEPS):
        if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
            break
        schema = pointed_at(root, schema["$ref"])
    return schema


def property_of(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of an object's property; None if nothing is said about it."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    more = schema.get("additionalProperties")
    return more if isinstance(more, Mapping) else None


def listed_in(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values that a schema itself lists; None: it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def values_of(schema: Any, root: Mapping[str, Any], steps: int = _MOST_STEPS) -> Sequence[Any]:
    """Return the values that a schema lists, also through references and branches; () if others fit it too."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or not steps:
        return ()
    if (values := listed_in(schema)) is not None:
        return values
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            each = [values_of(one, root, steps - 1) for one in schema[keyword]]
            return [value for values in each for value in values] if all(each) else ()
    return next((found for one in schema.get("allOf") or () if (found := values_of(one, root, steps - 1))), ())


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema's values may have; None: any."""
    return _types(schema, root, _MOST_STEPS)


def _types(schema: Any, root: Mapping[str, Any], steps: int) -> frozenset[str] | None:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or not steps:
        return None
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(given)
    if values := listed_in(schema):
        return frozenset(_OF_VALUES.get(type(value), "null") for value in values)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            each = [_types(one, root, steps - 1) for one in schema[keyword]]
            return None if None in each else frozenset().union(*(one for one in each if one is not None))
    for one in schema.get("allOf") or ():
        if (found := _types(one, root, steps - 1)) is not None:
            return found
    return None

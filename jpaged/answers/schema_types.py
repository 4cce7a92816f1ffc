"""Looks up what a JSON schema says about one argument: its schema, and the types of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jpaged.json_schema import pointed_at

T = TypeVar("T")
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


def values_of(schema: Any, root: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values that a schema lists, also through references and branches; () if others fit it too."""
    said = _said(schema, root, listed_in, {})
    return () if said is None else [value for values in said.values() for value in values]


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema's values may have; None: any."""
    said = _said(schema, root, _own_types, {})
    return None if said is None else frozenset().union(*said.values())


def _own_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema names itself or by the values that it lists; None: it does neither."""
    given = schema.get("type")
    if isinstance(given, str | list):
        return frozenset([given] if isinstance(given, str) else given)
    values = listed_in(schema)
    return None if values is None else frozenset(_OF_VALUES.get(type(value), "null") for value in values)


def _said(
    schema: Any,
    root: Mapping[str, Any],
    own: Callable[[Mapping[str, Any]], T | None],
    known: dict[int, Mapping[int, T] | None],
    steps: int = _MOST_STEPS,
) -> Mapping[int, T] | None:
    """Return what the branches of a schema say, each once, by their Python ids; None if one says nothing.

    A schema that is among its own branches adds nothing to itself.

    Args:
        own: returns what a schema says itself; None: nothing, so its own branches are looked at.
        known: what was found of other schemas, by id.
        steps: levels of `allOf` that are looked into.
    """
    schema = resolved(schema, root)
    if id(schema) in known or not steps:
        return known.get(id(schema))
    known[id(schema)] = {}
    said: dict[int, T] = {}
    waiting, seen = [schema], {id(schema)}
    while waiting:
        one = waiting.pop()
        found = own(one) if isinstance(one, Mapping) else None
        if found is not None:
            said[id(one)] = found
            continue
        of = one if isinstance(one, Mapping) else {}
        branches = next((of[keyword] for keyword in ("anyOf", "oneOf") if isinstance(of.get(keyword), list)), None)
        if branches is not None:
            new = {id(each): each for branch in branches if id(each := resolved(branch, root)) not in seen}
            seen |= new.keys()
            waiting += reversed(new.values())
            continue
        parts = (_said(each, root, own, known, steps - 1) for each in of.get("allOf") or ())
        if not (more := next(filter(None, parts), None)):
            known[id(schema)] = None
            return None
        said |= more
    known[id(schema)] = said
    return said

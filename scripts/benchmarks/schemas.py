"""Schemas of which no answer of some hundred tokens is whole, so that all requests have equally many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jpaged import StructuredOutputsParams


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PERSON = _object(
    {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    }
)
ORDER = _object(
    {
        "state": {"enum": ["new", "paid", "packed", "sent", "returned"]},
        "customer": _object({"id": {"type": "integer"}, "kind": {"enum": ["private", "company", "school"]}}),
        "lines": {
            "type": "array",
            "minItems": 2,
            "items": _object(
                {
                    "title": {"type": "string"},
                    "colour": {"enum": ["red", "green", "blue", "black", "white"]},
                    "price": {"type": "number"},
                    "is_gift": {"type": "boolean"},
                }
            ),
        },
    }
)
REGEX = r"([A-Z][a-z]+ [A-Z][a-z]+ <[a-z]+@[a-z]+\.(org|com|net)>; )+"


def listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list that is never whole."""
    return {"type": "array", "minItems": 50, "items": item}


def values(number: int, seed: int = 0) -> dict[str, Any]:
    """Return the schema of a list of so many values, others for each seed."""
    random = np.random.default_rng(seed)
    return listed({"enum": [f"item {random.integers(10**9)} of {seed}.{place}" for place in range(number)]})


SHAPES: dict[str, Callable[[], StructuredOutputsParams]] = {
    "object": lambda: StructuredOutputsParams(json=listed(PERSON)),
    "nested": lambda: StructuredOutputsParams(json=listed(ORDER)),
    "regex": lambda: StructuredOutputsParams(regex=REGEX),
    "10,000 values": lambda: StructuredOutputsParams(json=values(10_000)),
}

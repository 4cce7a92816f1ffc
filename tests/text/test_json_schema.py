"""Schemas are rewritten for llguidance without a change of meaning, or without what it cannot follow."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from test_grammar import letters

from jpaged.json_schema import first_unfollowed, followable, followed_as_far_as_can_be
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.grammar import GrammarCompiler

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
DIGITS = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*)$"


def allows(schema, value) -> bool:
    backend = letters()
    compiler = GrammarCompiler(SimpleNamespace(backend_tokenizer=backend), 257, frozenset({256}))
    followed = compiler.compile(StructuredOutputsParams(json=schema))
    for letter in json.dumps(value).replace(" ", "Ġ"):
        token = backend.token_to_id(letter)
        if followed.complete or not followed.mask[token // 32] >> token % 32 & 1:
            return False
        followed.accept(token)
    return followed.complete or bool(followed.mask[8] & 1)  # 256 ends a text


@pytest.mark.parametrize("pattern", [DECIMAL, DIGITS])
@pytest.mark.parametrize("text", ["1", "-12.50", "+0012.5", ".5", "1.", ".", "-", "", "+.", "1.2.3", "a1", "12345.678"])
def test_pydantics_pattern_of_a_decimal_is_followed(pattern, text):
    schema = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": pattern}]}
    assert allows(schema, text) is (re.search(pattern, text) is not None)


def test_an_unknown_format_is_an_annotation_and_a_known_one_is_followed():
    assert allows({"type": "string", "format": "color-hex"}, "so")
    assert not allows({"type": "string", "format": "date"}, "so") and allows(
        {"type": "string", "format": "date"}, "2026-11-26"
    )


def test_values_and_names_are_no_keywords():
    schema = {
        "properties": {"format": {"enum": [{"format": "x", "not": 1}]}, "not": {"const": {"uniqueItems": True}}},
        "default": {"oneOf": [1]},
    }
    assert followable(schema) == schema == followed_as_far_as_can_be(schema) and first_unfollowed(schema) is None


def test_a_schema_is_not_changed_in_place_however_deep_it_nests():
    schema: dict = {"type": "array", "uniqueItems": True}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    assert first_unfollowed(schema) == "uniqueItems"
    left = followed_as_far_as_can_be(schema)
    assert first_unfollowed(left) is None and first_unfollowed(schema) == "uniqueItems"


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [("a(?=b)", False), (r"\\(?:a)", True), (r"\ba", False), (r"(a)\1", False), (r"\\b", True), ("(?P<n>a)", True)],
)
def test_patterns_that_rust_does_not_know_are_found(pattern, fits):
    assert (first_unfollowed({"pattern": pattern}) is None) is fits


def nested(levels: int, inside: dict) -> dict:
    for _ in range(levels):
        inside = {"type": "object", "properties": {"a": inside}, "required": ["a"], "additionalProperties": False}
    return inside


def test_objects_nest_deeper_than_llguidances_reader_of_json():
    schema = nested(100, {"type": "integer"})
    value = 5
    for _ in range(100):
        value = {"a": value}
    assert allows(schema, value)
    assert not allows(schema, value["a"])


def test_references_of_a_schema_that_nests_deep_keep_their_targets():
    inside = {
        "type": "object",
        "properties": {"b": {"$ref": "#/$defs/one"}, "c": {"$ref": "#/properties/a/properties/a"}},
    }
    schema = nested(70, inside) | {"$defs": {"one": {"const": 1}}}
    flat = json.dumps(followable(schema))
    assert '"#/$defs/one"' not in flat and "/properties/" not in flat

    def value(inner, levels=70):
        for _ in range(levels):
            inner = {"a": inner}
        return inner

    assert allows(schema, value({"b": 1})) and not allows(schema, value({"b": 2}))
    assert allows(schema, value({"c": value({"b": 1}, 68)})) and not allows(schema, value({"c": value({"b": 1}, 67)}))


def test_a_deep_schema_whose_parts_cannot_be_moved_is_refused_with_the_limit():
    with pytest.raises(ValueError, match=r"\$id.*the limit is 100"):
        followable(nested(100, {"$id": "urn:x"}))
    value: list = []
    for _ in range(200):
        value = [value]
    with pytest.raises(ValueError, match=r"value in a schema nests .* the limit is 100"):
        followable({"const": value})


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_64_bits_and_more_are_narrowed(kind):
    bounds = {"type": kind, "minimum": -(2**63), "maximum": 2**63 - 1}
    assert allows(bounds, 10**18) and allows(bounds, -(10**18)) and allows(bounds, 0)
    assert allows({"type": kind, "exclusiveMaximum": 10**400}, 7)
    assert allows({"type": "string", "maxLength": 2**70}, "a")

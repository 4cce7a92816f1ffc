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

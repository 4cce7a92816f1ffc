"""Patterns of ECMAScript keep their meaning in Rust's syntax, with Python's package jsonschema as the judge."""

from __future__ import annotations

import json
import warnings

import jsonschema
import pytest
from followed_texts import compiled, follows
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged.json_patterns import rust_pattern
from jpaged.json_schema import first_unfollowed

PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ "
LITERALS = [
    *"aZ5 #é",
    *(f"\\{mark}" for mark in PUNCTUATION),
    *"]}&~-_<>=!,:;@%'\"`/",
    "{",
    "{a}",
    "{,",
    "\\x41",
    "\\u00e9",
]
SETS = [r"\d", r"\w", r"\s", r"\D", r"\S", ".", r"\t", r"\n", "[^x]"]
REPEATS = ["", "", "", "?", "*", "+", "{2}", "{1,}", "{0,2}", "{,2}", "{,}"]
IN_CLASS = [
    *"aZ5[&~#{}()|$.*+?/<>= é",
    *(f"\\{mark}" for mark in PUNCTUATION),
    r"\d",
    r"\w",
    r"\b",
    "&&",
    "[",
    "[:alpha:",
]
PARTS = st.one_of(
    st.tuples(st.sampled_from([*LITERALS, *SETS]), st.sampled_from(REPEATS)).map("".join),
    st.tuples(
        st.sampled_from(["[", "[^"]),
        st.lists(st.sampled_from([*IN_CLASS, "a-f", r"\+-/", "%-*"]), min_size=1, max_size=4).map("".join),
        st.sampled_from(["]", "-]", "]+", "]{,2}"]),
    ).map("".join),
)
PATTERNS = st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: f"^{''.join(parts)}$")
TEXTS = st.text(st.sampled_from("aZ5[]&~-{}()|$.*+?/<>=#!\"\\,:;@%'`_ ^é\t\n\b"), max_size=5)


def is_valid(pattern: str, text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python, for what other syntaxes nest in classes
        # Python's $ is also before a line end
        return jsonschema.Draft202012Validator({"pattern": f"{pattern[:-1]}\\Z"}).is_valid(text)


@settings(max_examples=examples(80), deadline=None, derandomize=True, database=None)
@given(PATTERNS, st.lists(TEXTS, min_size=6, max_size=6))
def test_a_pattern_matches_what_a_validator_says(pattern, texts):
    try:
        wanted = {text: is_valid(pattern, text) for text in texts}
    except Exception:
        return  # Python refuses it
    ascii_only = {text: fit for text, fit in wanted.items() if text.isascii()}  # \w and \d are ASCII's in ECMAScript
    try:
        grammar = compiled({"type": "string", "pattern": pattern})
    except ValueError as error:
        assert "Unsatisfiable" in str(error) and not any(ascii_only.values())
        return
    assert {text: follows(grammar, json.dumps(text)) for text in ascii_only} == ascii_only


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        (r"^[\-\/\.\"\ \_\<]+$", ["-/.", '"', " _<"], ["\\", "a"]),
        (r"^a\/b\<\>\-\_\é\ $", ["a/b<>-_é "], ["ab"]),
        ("^a{,3}$", ["", "aaa"], ["aaaa", "a{,3}"]),
        ("^{a}{1x{$", ["{a}{1x{"], ["a"]),
        ("^[[&&~~a+--]+$", ["[&~", "a,-"], ["b", "."]),
        (r"^[\b\0\cJ]$", ["\b", "\x00", "\n"], ["b", "c"]),
        (r"^\ud83d\ude00[\ud83d\ude00-\ud83d\ude02]$", ["😀😁"], ["😀a"]),
        ("^[^]$", ["a", "\n"], ["", "ab"]),
        ("^[^]]$", ["a"], ["]"]),
        (r"^[a-\d]+[\w-.]$", ["a-1-", "a."], ["b."]),
        (r"^\i\e\a[\i]$", ["ieai"], ["iea"]),
        (r"^(?<year>\d{4})-x$", ["2026-x"], ["206-x"]),
        (r"\\d", [r"\d"], ["1"]),
    ],
)
def test_forms_that_only_ecmascript_has(pattern, fitting, others):
    for schema, wrap in (
        ({"type": "string", "pattern": pattern}, lambda text: json.dumps(text, ensure_ascii=False)),
        (
            {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False},
            lambda text: f"{{{json.dumps(text, ensure_ascii=False)}:null}}",
        ),
    ):
        grammar = compiled(schema)
        assert [follows(grammar, wrap(text)) for text in [*fitting, *others]] == [True] * len(fitting) + [False] * len(
            others
        )


@settings(max_examples=examples(50), deadline=None, derandomize=True, database=None)
@given(PATTERNS)
def test_a_pattern_is_translated_once_for_all(pattern):
    assert rust_pattern(rust_pattern(pattern)) == rust_pattern(pattern)


def test_a_backspace_in_a_class_is_no_word_boundary():
    assert first_unfollowed({"pattern": r"[\b]"}) is None and first_unfollowed({"pattern": r"\ba"}) is not None

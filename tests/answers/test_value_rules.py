"""Rules of arguments that are no JSON follow a schema as far as rules of JSON do."""

from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer
from renderings import tokenizer_of

from jpaged.answers.bound import BoundFormat
from jpaged.answers.rows import ANSWER_FORMATS
from jpaged.answers.schema_types import types_of

CALLS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>",
    "pythonic": "[f(x={})]",
    "gemma4": "<|tool_call>call:f{{x:{}}}<tool_call|>",
}
"""A call of a function with one argument, in tags, in Python's literals and in a family's own."""


@cache
def tokens():
    tokenizer = tokenizer_of(None)
    made = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer), eos_token=tokenizer.eos_token_id)
    return tokenizer, made


def allows(family, argument, text, **more):
    """Tell whether a family's grammar allows a text as the argument `x`, of which the schema is given."""
    schema = {"type": "object", "properties": {"x": argument}, "required": ["x"], "additionalProperties": False, **more}
    form = BoundFormat(ANSWER_FORMATS[family])
    functions = [{"name": "f", "parameters": schema}]
    grammar = form.grammar.answer(functions, forced=True, parallel=False, thought="none")
    tokenizer, known = tokens()
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    ids = tokenizer.encode(CALLS[family].format(text), add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("reference", "fits"), [("#", '[{"x": []}]'), ("#/properties/y", '[{"n": 1}]'), ("#/properties/y/items", "[2]")]
)
def test_a_reference_to_any_part_of_the_schema_is_followed_within_a_value(reference, fits):
    y = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "items": {"type": "integer"}}
    properties = {"x": {"type": "array", "items": {"$ref": reference}}, "y": y}
    assert allows("qwen3_coder", None, fits, properties=properties)
    assert not allows("qwen3_coder", None, "[[]]", properties=properties)


@pytest.mark.parametrize(
    ("pattern", "fits", "wrong"),
    [(r"^\d{2}\/\d{2}$", "12/34", "12-34"), ("^a/b$", "a/b", r"a\/b"), (r"^a\\$", "a\\", "ab"), (r"a\$", "a$b", "ab")],
)
def test_a_pattern_may_have_slashes_and_anchors_with_and_without_a_backslash(pattern, fits, wrong):
    argument = {"type": "string", "pattern": pattern}
    assert allows("qwen3_coder", argument, fits)
    assert not allows("qwen3_coder", argument, wrong)


@pytest.mark.parametrize("family", ["qwen3_coder", "pythonic", "gemma4"])
def test_a_union_that_is_among_its_own_branches_adds_nothing_to_itself(family):
    own = {"$ref": "#/$defs/x"}
    union = {"anyOf": [own, {"anyOf": [own, own, {"type": "integer"}]}, {"type": "array", "items": own}]}
    for fits in ("3", "[]", "[[3],4]" if family == "gemma4" else "[[3], 4]"):
        assert allows(family, own, fits, **{"$defs": {"x": union}})
    assert not allows(family, own, "true", **{"$defs": {"x": union}})
    assert types_of(own, {"$defs": {"x": union}}) == {"integer", "array"}


def test_a_union_of_too_many_schemas_is_refused():
    own = {f"x{i}": {"anyOf": [{"$ref": f"#/$defs/x{i + 1}"}] * 2} for i in range(20)} | {"x20": {"type": "integer"}}
    with pytest.raises(ValueError, match=r"^the parameters of 'f': .* a union of more than 10,000 schemas"):
        allows("qwen3_coder", {"$ref": "#/$defs/x0"}, "1", **{"$defs": own})
    assert types_of({"$ref": "#/$defs/x0"}, {"$defs": own}) == {"integer"}


def test_definitions_that_would_be_written_again_and_again_end_at_a_grammars_limit():
    own = {"much": {"const": "a" * 10_000}}
    properties = {f"x{i}": {"type": "array", "items": {"$ref": "#/$defs/much"}} for i in range(200)}
    with pytest.raises(ValueError, match="more than 1,048,576 characters, the limit of a grammar"):
        allows("qwen3_coder", None, "", properties=properties, **{"$defs": own})
    alone = {f"x{i}": {"type": "array", "items": {"type": "integer"}} for i in range(200)}
    assert allows("qwen3_coder", None, "[1]", properties={"x": {"type": "array"}} | alone, **{"$defs": own})

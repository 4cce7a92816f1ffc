"""Texts of a given shape from a random model at temperature 1."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import tiny_chat_model
from greedy_reference import random_prompts

from jpaged import LLM, SamplingParams, StructuredOutputsParams

PROMPTS = random_prompts(lengths=(3, 9))
EOS = 2


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_chat_model.make_chat_model(folder)
    tiny_chat_model.byte_level_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return LLM(str(folder), dtype="float32", block_size=8, max_num_seqs=8, max_model_len=512, max_num_batched_tokens=64)


def generate(llm, params, prompts=PROMPTS):
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.control.engine.memory.num_used_blocks == 0
    return [sequence for output in outputs for sequence in output.outputs]


def drawn(*, max_tokens=300, **structure) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=1, n=4, max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**structure)
    )


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tall": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) - {"tall"} == {"name", "age"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 120


def is_nested(text: str) -> bool:
    depth = text.count("(")
    return text == "(" * depth + "x" + ")" * depth


def is_numbers(text: str) -> bool:
    value = json.loads(text)
    return 2 <= len(value) <= 4 and all(v in (1, "two", None) for v in value)


class LikePydantic:
    @classmethod
    def model_json_schema(cls):
        return PERSON


NUMBERS = {"type": "array", "items": {"enum": [1, "two", None]}, "minItems": 2, "maxItems": 4}
SHAPES = {
    "object": ({"json": PERSON}, is_person),
    "schema text": ({"json": json.dumps(NUMBERS)}, is_numbers),
    "class": ({"json": LikePydantic}, is_person),
    "regex": ({"regex": r"[A-F]{2,5}-\d+(\.\d\d)?"}, re.compile(r"[A-F]{2,5}-\d+(\.\d\d)?").fullmatch),
    "choice": ({"choice": ["yes", "no", 'a "quoted" one', "yes, of course"]}, None),
    "grammar": ({"grammar": 'start: "(" start ")" | "x"'}, is_nested),
    "GBNF": ({"grammar": 'root ::= "(" root ")" | [x-x]'}, is_nested),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_random_model_draws_has_the_shape(llm, name):
    structure, fits = SHAPES[name]
    fits = fits or structure["choice"].__contains__
    texts = []
    for sequence in generate(llm, drawn(**structure)):
        if sequence.finish_reason != "length":
            assert sequence.finish_reason == "stop" and sequence.stop_reason is None
            assert fits(sequence.text), sequence.text
            texts.append(sequence.text)
    assert len(texts) >= 4 and len(set(texts)) > 1


@pytest.mark.parametrize(
    ("regex", "limits", "text"),
    [
        ("[A-F]{1,9}", {"min_tokens": 7}, "[A-F]{7,9}"),
        ("[A-F]{1,9}", {"ignore_eos": True}, "[A-F]{9}"),
        ("[A-F]{1,9}", {"bad_words": ["B", "AA", "CD"]}, "(?!.*(B|AA|CD))[A-F]{1,9}"),
        ("[A-F]{4}(X|[A-F]{3})", {"allowed_token_ids": "ACE"}, "[ACE]{7}"),
        ("[A-F]{9}", {"allowed_token_ids": "ACE", "bad_words": ["A"], "min_tokens": 9}, "[CE]{9}"),
    ],
)
def test_other_limits_hold_together_with_the_shape(llm, regex, limits, text):
    if "allowed_token_ids" in limits:
        limits = limits | {"allowed_token_ids": llm.tokenizer.convert_tokens_to_ids(list(limits["allowed_token_ids"]))}
    found = generate(llm, replace(drawn(regex=regex), **limits))
    assert all(re.fullmatch(text, s.text) and s.finish_reason == "stop" for s in found), [s.text for s in found]


def test_a_model_that_would_write_the_longer_word_of_a_gbnf_grammar_writes_it(llm):
    grammar = 'root ::= ("list" | "listen") "ed"'
    n, e = llm.tokenizer.convert_tokens_to_ids(["n", "e"])  # "e" before a token "ed", which would decide at once
    for bias, text in ((100, "listened"), (-100, "listed")):
        found = generate(llm, replace(drawn(grammar=grammar), logit_bias={n: bias, e: 100}))
        assert {s.text for s in found} == {text} and all(s.finish_reason == "stop" for s in found)


def test_a_shape_that_cannot_go_on_is_aborted_with_a_reason(llm):
    allowed = llm.tokenizer.convert_tokens_to_ids(["A"])
    for sequence in generate(llm, replace(drawn(regex="AAB"), allowed_token_ids=allowed)):
        assert (sequence.text, sequence.finish_reason) == ("AA", "abort")
        assert sequence.stop_reason.startswith("structured_outputs needs a token here that allowed_token_ids")


def test_any_json_object(llm):
    for sequence in generate(llm, drawn(json_object=True, max_tokens=400)):
        if sequence.finish_reason == "stop":
            assert isinstance(json.loads(sequence.text), dict)
        else:
            assert sequence.text.lstrip().startswith("{")


def test_json_may_be_asked_for_without_white_space(llm):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "required": ["a", "b"]}
    compact = re.compile(r'\{"a":(true|false),"b":null\}')
    for sequence in generate(llm, drawn(json=schema | {"additionalProperties": False}, disable_any_whitespace=True)):
        assert compact.fullmatch(sequence.text), sequence.text


def test_the_text_ends_where_nothing_can_follow_and_may_end_where_it_is_complete(llm):
    forced = generate(llm, drawn(regex="ABC"))
    assert all(s.text == "ABC" and s.finish_reason == "stop" and EOS not in s.token_ids for s in forced)
    free = generate(llm, drawn(regex="A{2,90}"))
    assert all(re.fullmatch("A{2,90}", s.text) and s.finish_reason == "stop" for s in free)
    ended = [s.token_ids[-1] == EOS for s in free]
    assert any(ended) and all(s.text == "A" * 90 for s, eos in zip(free, ended, strict=True) if not eos)


def test_unconstrained_requests_of_the_batch_are_not_touched(llm):
    plain = [SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True) for i in range(2)]
    alone = [s.token_ids for s in generate(llm, plain)]
    mixed = generate(llm, [drawn(regex=r"\d{9}"), *plain, drawn(json=NUMBERS)], [PROMPTS[0], *PROMPTS, PROMPTS[1]])
    assert [s.token_ids for s in mixed[4:6]] == alone
    assert all(re.fullmatch(r"\d{9}", s.text) for s in mixed[:4])
    assert all(is_numbers(s.text) for s in mixed[6:] if s.finish_reason == "stop")


def test_a_choice_is_drawn_as_often_as_the_model_would(llm):
    """Single tokens, so that the masked distribution is the model's own, renormalised."""
    letters = "ABCDEF"
    ids = [llm.tokenizer.convert_tokens_to_ids(letter) for letter in letters]
    one = {"temperature": 1.0, "max_tokens": 1}
    choice = StructuredOutputsParams(choice=list(letters))
    structured = [SamplingParams(seed=i, structured_outputs=choice, **one) for i in range(64)]
    allowed = [SamplingParams(seed=i, allowed_token_ids=ids, **one) for i in range(64)]
    prompts = [PROMPTS[0]] * 64
    want = [s.token_ids for s in generate(llm, allowed, prompts)]
    assert [s.token_ids for s in generate(llm, structured, prompts)] == want
    assert len({tuple(tokens) for tokens in want}) > 2


@pytest.mark.parametrize(
    "choice", [(x for x in ["red", "blue"]), np.array(["red", "blue"])], ids=["generator", "array"]
)
def test_choices_may_come_from_any_iterable(choice):
    assert StructuredOutputsParams(choice=choice).choice == ("red", "blue")


REFUSED = [
    (lambda: StructuredOutputsParams(), r"exactly one of json, .*; it got \[\]"),
    (lambda: StructuredOutputsParams(regex="a", choice=["b"]), r"exactly one .*; it got \['regex', 'choice'\]"),
    (lambda: StructuredOutputsParams(json="{nope"), "json='{nope' is not JSON"),
    (lambda: StructuredOutputsParams(json=[1]), r"json=\[1\] must be a schema"),
    (lambda: StructuredOutputsParams(choice=[]), r"choice=\[\] must be a list"),
    (lambda: StructuredOutputsParams(choice=["a", ""]), "must be non-empty strings, got ''"),
    (lambda: StructuredOutputsParams(choice=5), "choice=5 must be a list"),
    (lambda: StructuredOutputsParams(choice=(x for x in ())), "choice=<generator .* must be a list of non-empty"),
    (lambda: StructuredOutputsParams(json=np.ones(2)), r"json=array\(\[1., 1.\]\) must be a schema"),
    (lambda: StructuredOutputsParams(json={"enum": [{1, 2}]}), "json={'enum': .* is not JSON: .*set is not JSON"),
    (lambda: StructuredOutputsParams(json_object=0), "json_object=0 must be True or False"),
    (lambda: drawn(regex=r"[^\s\S]"), r"prompt 0: regex='\[\^\\\\s\\\\S\]' cannot be followed: no text fits it$"),
    (lambda: StructuredOutputsParams(regex=3), "regex=3 must be a non-empty string"),
    (lambda: StructuredOutputsParams(regex="a" * (2**20 + 1)), "regex has 1048577 characters, the limit is 1048576"),
    (lambda: StructuredOutputsParams(grammar="a" * (2**23)), "grammar has 8388608 characters, the limit is 1048576"),
    (lambda: SamplingParams(structured_outputs={"regex": "a"}), "must be StructuredOutputsParams"),
    (lambda: drawn(json={"type": "nonsense"}), "nonsense.* cannot be followed"),
    (lambda: drawn(regex="a("), "regex='a\\(' cannot be followed: [^\n]*unclosed group$"),
    (lambda: drawn(grammar='start: "a" | foo'), 'cannot be followed: .*unknown name: "foo"'),
    (lambda: replace(drawn(regex="a"), allowed_token_ids=[5]), "together leave no token that the output could begin"),
    (lambda: drawn(grammar="foo ::= 'a'"), "grammar=.* cannot be read as GBNF"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_wrong_values_are_refused_before_anything_runs(llm, make, message):
    steps = llm.control.engine.stats.num_steps
    with pytest.raises(ValueError, match=f"(?s){message}"):
        generate(llm, make())
    assert llm.control.engine.stats.num_steps == steps


def test_a_tokenizer_that_grammars_cannot_read_is_refused(tmp_path):
    tiny_chat_model.make_chat_model(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", block_size=8, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=16)
    with pytest.raises(ValueError, match="structured_outputs cannot use this model's tokenizer"):
        generate(llm, drawn(regex="a"))

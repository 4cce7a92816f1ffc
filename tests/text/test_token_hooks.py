"""A grammar and what else a request forbids, combined on the host."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds_of_tokenizers import byte_level
from thorough import examples

from jpaged.sampling_params import SamplingParams, StructuredOutputsParams
from jpaged.text.grammar import Grammar
from jpaged.text.input_processor import InputProcessor
from jpaged.text.token_hooks import CombinedRules, Limits, packed_bits

TOKENIZER = byte_level()
EOS = TOKENIZER.convert_tokens_to_ids("</s>")
INPUTS = InputProcessor(TOKENIZER, vocab_size=len(TOKENIZER), max_model_len=512, max_num_seqs=4, eos_token_ids=(EOS,))
ENDS = "structured_outputs needs a token here that"


def rules(regex: str, **params):
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex), **params)
    return INPUTS.process([5], wanted).sequences[0].grammar


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def token(letter: str) -> int:
    return TOKENIZER.convert_tokens_to_ids(letter)


def allowed(rule) -> set[int]:
    bits = np.unpackbits(rule.mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: len(TOKENIZER)]).tolist())


def test_a_request_without_other_limits_has_the_grammar_alone():
    assert type(rules("a+")) is Grammar and type(rules("a+", min_tokens=1)) is CombinedRules


def test_the_end_is_not_drawn_before_min_tokens_where_the_shape_goes_on():
    rule = rules("A{2,9}", min_tokens=4)
    for count in range(9):
        assert (EOS in allowed(rule)) == (count >= 4)
        rule.accept(token("A"))
    assert rule.complete and rule.error is None


def test_a_text_that_can_only_end_ends_before_min_tokens():
    rule = rules("ABC", min_tokens=9)
    for letter in "ABC":
        assert allowed(rule) == {token(letter)}
        rule.accept(token(letter))
    assert rule.complete and rule.error is None


def test_with_ignore_eos_the_text_goes_on_as_long_as_the_shape_allows():
    rule = rules("A{1,5}", ignore_eos=True)
    for _ in range(5):
        assert EOS not in allowed(rule) and not rule.complete
        rule.accept(token("A"))
    assert rule.complete


def test_only_allowed_tokens_are_left_of_the_shape():
    rule = rules("[A-F]{3}", allowed_token_ids=[token("A"), token("D"), token("Z")])
    assert allowed(rule) == {token("A"), token("D")}


def test_bad_words_of_one_and_several_tokens_are_taken_out():
    rule = rules("[A-D]{6}", bad_words=["D", "AB", "CCA"])
    assert allowed(rule) & {token(c) for c in "ABCD"} == {token(c) for c in "ABC"}
    rule.accept(token("A"))
    assert token("B") not in allowed(rule) and token("C") in allowed(rule)
    rule.accept(token("C"))
    assert token("A") in allowed(rule)
    rule.accept(token("C"))
    assert token("A") not in allowed(rule) and token("B") in allowed(rule)


def test_the_last_token_of_a_phrase_is_taken_out_whatever_its_place_in_a_word():
    for last in range(96):
        limits = Limits(96, allowed=None, bad_words=[(5, last)], never=(), late=(), min_tokens=0, endings=())
        assert np.array_equal(limits.mask([7, 5]), limits.mask([5, 7]) & ~packed_bits([last], 96))


def test_where_nothing_is_left_a_complete_text_ends_and_another_is_aborted_with_a_reason():
    complete = rules("A(BC)?", allowed_token_ids=[token("A")])
    complete.accept(token("A"))
    assert complete.complete and complete.error is None
    cut = rules("AB", allowed_token_ids=[token("A")])
    cut.accept(token("A"))
    assert not cut.complete and cut.error.startswith(ENDS)


def test_what_leaves_no_first_token_is_refused():
    with pytest.raises(ValueError, match="together leave no token that the output could begin with"):
        rules("A+", bad_words=["A"])


def test_rules_followed_anew_and_copies_are_where_the_first_was():
    rule = rules("[AB]{9}", bad_words=["AB"], min_tokens=3)
    copy = rule.copy()
    for letter in "BBA":
        rule.accept(token(letter))
    copy.restart([token(letter) for letter in "BBA"])
    assert allowed(copy) == allowed(rule) and token("B") not in allowed(rule)
    rule.restart([])
    assert allowed(rule) == allowed(rules("[AB]{9}", bad_words=["AB"], min_tokens=3))


@settings(max_examples=examples(60), deadline=None)
@given(
    regex=st.sampled_from(["[A-E]{0,7}", "(AB|C)*D?", "A{3}(B|CD){1,4}", "(A|BB|CCC)+"]),
    bad=st.lists(st.sampled_from(["A", "B", "AB", "BB", "CCC", "ACA", "DD"]), max_size=3, unique=True),
    letters=st.none() | st.sets(st.sampled_from("ABCDE"), min_size=1),
    least=st.integers(0, 6),
    ignore=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_drawn_keeps_every_rule_whatever_is_combined(regex, bad, letters, least, ignore, seed):
    """The mask is the grammar's own less what each limit forbids, one token at a time, until an end that is right."""
    chosen = None if letters is None else [*(token(c) for c in sorted(letters)), EOS]
    limits = {"bad_words": bad, "allowed_token_ids": chosen, "min_tokens": least, "ignore_eos": ignore}
    plain = rules(regex)
    draw = random.Random(seed)
    banned = [tuple(ids(text)) for word in bad for text in (word, " " + word)]
    try:
        rule = rules(regex, **limits)
    except ValueError:
        return
    tokens: list[int] = []
    for _ in range(12):
        if plain.complete:
            assert rule.complete
            return
        want = allowed(plain)
        want -= {EOS} if ignore or len(tokens) < least else set()
        want = want if chosen is None else want & set(chosen)
        want -= {last for *before, last in banned if not before or tokens[-len(before) :] == before}
        if not want:
            assert rule.complete == (EOS in allowed(plain)) and (rule.error is None) == rule.complete
            return
        assert allowed(rule) == want and not rule.complete
        next_token = draw.choice(sorted(want))
        if next_token == EOS:
            return
        tokens.append(next_token)
        plain.accept(next_token)
        rule.accept(next_token)

"""Marks of a conversation as numbers of tokens of its prompt."""

from __future__ import annotations

import pytest
import tiny_chat_model
from hypothesis import given
from hypothesis import strategies as st

from jpaged.sampling_params import SamplingParams
from jpaged.text.input_processor import InputProcessor
from jpaged.text.marked_prefixes import MarkedPrefix, common_beginning, tokens_before
from jpaged.text.prompt import Conversation, chat_prompt

TOKENIZER = tiny_chat_model.tokenizer()
SYSTEM = {"role": "system", "content": "be brief"}


def user(*parts):
    return {"role": "user", "content": parts[0] if len(parts) == 1 else [{"type": "text", "text": p} for p in parts]}


TALK = [SYSTEM, user("one"), {"role": "assistant", "content": "two"}, user("three", "four")]


def kept(messages, marks, tokenizer=None):
    """Return the text before each breakpoint, with its seconds."""
    tokenizer = tokenizer or tiny_chat_model.tokenizer()
    made = chat_prompt(Conversation(messages), tokenizer, marks=[MarkedPrefix(*one) for one in marks])
    ids = made["prompt_token_ids"]
    return {tokenizer.decode(ids[: each["position"]]): each["seconds"] for each in made.get("cache_breakpoints", ())}


def test_a_mark_lies_at_the_end_of_a_message_or_within_it():
    first = "<s>system: be brief<s>user: one<s>assistant: two"
    marks = [(TALK[:1], 300.0), (TALK[:3], 300.0), ([*TALK[:3], user("three")], 3600.0), (TALK, 60.0)]
    want = {"<s>system: be brief": 300.0, first: 300.0, f"{first}<s>user: three": 3600.0}
    assert kept(TALK, marks) == want | {f"{first}<s>user: threefour": 60.0}


def test_of_two_marks_in_one_place_the_longer_time_counts():
    assert kept(TALK, [(TALK[:1], 300.0), (TALK[:1], 3600.0), (TALK[:1], 300.0)]) == {"<s>system: be brief": 3600.0}


def test_a_token_over_a_mark_is_left_out():
    tokenizer = tiny_chat_model.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [user("so: ca"), user("bcd")]  # "ab" is one token
    assert list(kept(talk, [(talk[:1], 300.0)], tokenizer)) == ["so: "]


REFUSING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages[-1].role != 'user' %}{{ 1/0 }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", None),
        (REFUSING, "s"),
        ("{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}", "s"),
    ],
)
def test_a_mark_keeps_what_the_prompt_has_in_common_with_its_beginning(template, text):
    tokenizer = tiny_chat_model.tokenizer()
    tokenizer.chat_template = template
    system = {"role": "system", "content": "s"}
    found = kept([system, user("one")], [([system], 300.0)], tokenizer)
    assert list(found) == ([] if text is None else [text])


def test_breakpoints_count_the_tokens_that_are_left_of_a_prompt():
    inputs = InputProcessor(tiny_chat_model.tokenizer(), vocab_size=256, max_model_len=640, max_num_seqs=4)
    prompt = {
        "prompt_token_ids": list(range(3, 40)),
        "cache_breakpoints": [{"position": 10, "seconds": 60.0}, {"position": 30, "seconds": 60.0}],
        "retention_directives": [
            {"start": 0, "end": 10, "priority": 1},
            {"start": 5, "end": 20, "priority": 2},
            {"start": 25, "end": None, "priority": 3},
        ],
    }
    made = inputs.process(prompt, SamplingParams(truncate_prompt_tokens=20)).retention
    assert [one.position for one in made.breakpoints] == [13]
    assert [(one.start, one.end, one.priority) for one in made.directives] == [(0, 3, 2), (8, None, 3)]


@given(st.text("ab .", max_size=30), st.integers(0, 30))
def test_tokens_before_an_end_are_those_of_a_beginning(text, end):
    ids, end = TOKENIZER.encode(text, add_special_tokens=False), min(end, len(text))
    found = tokens_before(TOKENIZER, text, end, ids)
    assert TOKENIZER.decode(ids[:found]) == text[:end][: len(TOKENIZER.decode(ids[:found]))]


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_a_common_beginning_is_the_longest(one, other):
    found = common_beginning(one, other)
    assert one.startswith(found) and other.startswith(found)
    assert len(found) == min(len(one), len(other)) or one[len(found)] != other[len(found)]

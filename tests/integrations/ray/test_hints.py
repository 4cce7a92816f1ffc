"""Beginnings of prompts have names: equal ones where prompts, owners and salts begin alike, and only there."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.integrations.ray.hints import CHUNK, MAX_CHUNKS, prefix_chain

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def chain(path=COMPLETIONS, owner="", **body):
    return prefix_chain(path, json.dumps(body).encode(), owner)


def common(one, other):
    return sum(1 for a, b in zip(one, other, strict=False) if a == b)


@given(st.integers(0, 3 * CHUNK), st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_as_many_names_are_equal_as_whole_chunks_are(shared, one, other):
    head = "x" * shared
    first, second = chain(prompt=head + one), chain(prompt=head + other)
    equal = len(head) + next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    assert common(first, second) == equal // CHUNK
    assert len(first) == len(head + one) // CHUNK and len(set(first)) == len(first)


def test_a_later_turn_of_a_conversation_begins_like_the_earlier_one():
    turns = [{"role": "user", "content": "u" * 700}, {"role": "assistant", "content": "a" * 700}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for path, field in ((CHAT, "messages"), (RESPONSES, "input")):
        first = chain(path, tools=tools, **{field: turns[:1]})
        later = chain(path, tools=tools, **{field: [*turns, {"role": "user", "content": "more"}]})
        assert len(later) > len(first) >= 2 and common(first, later) == len(first)
        assert common(first, chain(path, **{field: turns[:1]})) == 0  # tools stand before the messages


def test_instructions_stand_before_the_input():
    first = chain(RESPONSES, instructions="i" * 600, input="one")
    assert first and first == chain(RESPONSES, instructions="i" * 600, input="two")


def test_prompts_may_be_tokens_and_of_several_the_first_decides():
    tokens = list(range(500))
    assert chain(prompt=tokens) == chain(prompt=[tokens, [1]]) != ()
    assert chain(prompt="a" * 600) == chain(prompt=["a" * 600, "b"]) != ()


def test_owners_salts_and_models_share_nothing():
    prompt = "a" * 3 * CHUNK
    chains = [
        chain(prompt=prompt),
        chain(prompt=prompt, owner="me"),
        chain(prompt=prompt, cache_salt="s"),
        chain(prompt=prompt, model="m"),
    ]
    assert len({name for one in chains for name in one}) == 12


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"prompt": 3}', b'{"prompt": []}', b"[" * 100_000, b'{"prompt": "\\ud800"}', b"\xff"]
)
def test_what_is_no_request_has_no_chain(body):
    assert prefix_chain(COMPLETIONS, body) == ()


def test_other_paths_and_short_prompts_have_no_chain_and_long_ones_a_bounded_one():
    assert chain("/tokenize", prompt="a" * 1000) == ()
    assert chain(prompt="a" * (CHUNK - 1)) == ()
    assert len(chain(prompt="a" * (CHUNK * MAX_CHUNKS + 5000))) == MAX_CHUNKS

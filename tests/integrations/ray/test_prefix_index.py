"""A prompt goes to the replica that holds its prefix, unless that one is overloaded."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.integrations.ray.prefix_index import Policy, PrefixIndex


def links(text):
    """A chain whose names are the prompt's own beginnings."""
    return tuple(text[: i + 1].encode() for i in range(len(text)))


def policy(overload=2, **held):
    index = PrefixIndex(100)
    for name, texts in held.items():
        for text in texts:
            index.add(name, links(text))
    return Policy(index, overload=overload)


def test_the_longest_prefix_wins():
    chosen = policy(a=["xy"], b=["xyzzy", "q"])
    assert chosen.ranked(links("xyzzy and"[:7]), {"a": 0, "b": 2}) == [["b"], ["a"]]


def test_an_overloaded_holder_gives_way_to_the_next_best_and_then_to_the_least_busy():
    chosen = policy(overload=2, a=["xyzzy"], b=["xyz"], c=["q"])
    assert chosen.ranked(links("xyzzy"), {"a": 3, "b": 1, "c": 0})[0] == ["b"]
    assert chosen.ranked(links("xyzzy"), {"a": 3, "b": 3, "c": 0})[0] == ["c"]
    assert chosen.ranked(links("xyzzy"), {"a": 9, "b": 9, "c": 7})[0] == ["a"]  # all are busy alike


def test_holders_of_the_same_length_share_a_rank_the_less_busy_first():
    assert policy(a=["xy"], b=["xy"], c=["xy"]).ranked(links("xy"), {"a": 2, "b": 1, "c": 8}) == [["b", "a"], ["c"]]


def test_a_short_common_head_does_not_draw_all_new_prompts_to_one_replica():
    chosen = policy(a=["headxxxx", "headyyyy"], b=["q"])
    assert chosen.ranked(links("head" + "z" * 5), {"a": 0, "b": 0})[0] == ["b"]  # as busy, and it holds less
    assert chosen.ranked(links("head" + "z" * 4), {"a": 0, "b": 0})[0] == ["a"]


def test_a_prompt_without_a_chain_goes_to_the_least_busy():
    assert policy(a=["x"]).ranked((), {"a": 1, "b": 0, "c": 2}) == [["b"], ["a"], ["c"]]


def test_replicas_that_are_equal_take_turns():
    chosen = policy()
    firsts = [chosen.ranked((), {"a": 0, "b": 0})[0] for _ in range(4)]
    assert firsts == [["a"], ["b"], ["a"], ["b"]]
    assert chosen.ranked((), {"a": 0, "b": 0, "c": 0})[0] == ["c"]  # it has had none yet, and catches up only once
    assert chosen.ranked((), {"a": 0, "b": 0, "c": 0})[0] == ["a"]
    chosen.keep_only(["b", "c"])
    assert chosen.ranked((), {"a": 0, "b": 0, "c": 0})[0] == ["a"]  # another one by that name


def test_what_a_replica_that_ended_held_is_forgotten():
    index = PrefixIndex(10)
    index.add("a", links("xy"))
    index.keep_only(["b"])
    assert index.match("a", links("xy")) == 0 == index.size("a")


@pytest.mark.parametrize(
    "settings", [{"overload": -1}, {"overload": 1, "min_share": 0.0}, {"overload": 1, "min_share": 1.5}]
)
def test_limits_are_checked(settings):
    with pytest.raises(ValueError, match=next(reversed(settings))):
        Policy(PrefixIndex(1), **settings)
    with pytest.raises(ValueError, match="max_chunks"):
        PrefixIndex(0)


@given(st.lists(st.text("ab", max_size=6), max_size=20), st.integers(1, 12))
def test_an_index_forgets_what_was_used_longest_ago_and_tails_before_heads(texts, most):
    index, model = PrefixIndex(most), OrderedDict()
    for text in texts:
        index.add("a", links(text))
        for link in reversed(links(text)):
            model.pop(link, None)
            model[link] = None
        while len(model) > most:
            model.popitem(last=False)
    assert index.size("a") == len(model) <= most
    for text in texts:
        held = next((i for i, link in enumerate(links(text)) if link not in model), len(text))
        assert index.match("a", links(text)) == held


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 6), min_size=1),
    st.dictionaries(st.sampled_from("abcd"), st.text("xy", max_size=5)),
    st.text("xy", max_size=5),
    st.integers(0, 3),
)
def test_every_replica_stands_in_one_rank_and_the_first_is_not_overloaded(loads, held, text, overload):
    ranks = policy(overload=overload, **{name: [one] for name, one in held.items()}).ranked(links(text), loads)
    assert sorted(name for rank in ranks for name in rank) == sorted(loads)
    assert all(loads[name] <= min(loads.values()) + overload for name in ranks[0])

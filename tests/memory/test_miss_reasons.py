"""Why prompt tokens were not found: each reason, and that all tokens of a prompt are accounted for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from memory_pools import full_manager, run, window_manager
from test_recurrent_policies import SIZE, hybrid
from thorough import examples

from jpaged.memory.miss_reasons import REASONS


def ask(manager, seq_id: int, tokens: list[int], *, computes_all: bool = False, **match_options):
    """Serve a prompt to its end; return (tokens found, missed tokens by reason)."""
    before = +manager.misses.tokens
    manager.add(seq_id, seq_id)
    cached = manager.match_prefix(seq_id, tokens, max_tokens=0 if computes_all else None, **match_options)
    manager.note_misses(seq_id, len(tokens), computes_all=computes_all)
    run(manager, seq_id, tokens, cached)
    manager.free(seq_id)
    missed = manager.misses.tokens - before
    assert cached + missed.total() == len(tokens) and set(missed) <= set(REASONS)
    return cached, dict(missed)


def test_a_prompt_is_new_then_found_to_its_last_block_then_evicted():
    manager = full_manager(8, prefix_caching=True)
    assert ask(manager, 0, [1] * 14) == (0, {"never_seen": 14})
    assert ask(manager, 1, [1] * 14) == (12, {"inside_block": 2})
    assert ask(manager, 2, [2] * 32) == (0, {"never_seen": 32})
    assert ask(manager, 3, [1] * 14) == (0, {"evicted": 12, "inside_block": 2})


def test_what_goes_on_from_a_prompt_is_new_after_the_part_of_a_block_that_is_not():
    manager = full_manager(20, prefix_caching=True)
    ask(manager, 0, [*range(16)])
    assert ask(manager, 1, [*range(10), 90, 91, 92, 93, 94, 95, 96]) == (8, {"inside_block": 2, "never_seen": 7})


def test_a_prompt_of_another_salt_is_known_by_its_tokens():
    manager = full_manager(20, prefix_caching=True)
    ask(manager, 0, [1] * 9, salt="a")
    assert ask(manager, 1, [1] * 9, salt="b") == (0, {"other_salt": 8, "inside_block": 1})
    assert ask(manager, 2, [1] * 9, salt=("a", "adapter")) == (0, {"other_salt": 8, "inside_block": 1})
    assert ask(manager, 3, [1] * 9, salt="b") == (8, {"inside_block": 1})


def test_a_state_without_a_checkpoint_is_told_from_what_was_evicted():
    manager = hybrid(40, 4 * SIZE)
    tokens = [*range(3 * SIZE + 1)]
    ask(manager, 0, tokens)
    cached, missed = ask(manager, 1, tokens)
    assert missed == {"no_checkpoint": 3 * SIZE - cached, "inside_block": 1}


def test_without_a_cache_or_where_all_is_computed_it_is_off():
    assert ask(full_manager(8), 0, [1] * 9) == (0, {"caching_off": 9})
    manager = full_manager(8, prefix_caching=True)
    ask(manager, 0, [1] * 9)
    assert ask(manager, 1, [1] * 9, computes_all=True) == (0, {"caching_off": 9})


def test_a_cache_that_was_reset_has_evicted_nothing_and_counts_go_on():
    manager = full_manager(8, prefix_caching=True)
    ask(manager, 0, [1] * 9)
    assert manager.reset_prefix_cache()
    assert ask(manager, 1, [1] * 9) == (0, {"never_seen": 9})
    manager.clear()
    assert manager.misses.tokens.total() == 18


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.sampled_from([None, "a", "b"])), max_size=20
    ),
    st.booleans(),
)
def test_every_token_of_a_prompt_is_found_or_missed_for_one_reason(requests, windows):
    manager = (window_manager if windows else full_manager)(12, prefix_caching=True)
    for number, (tokens, salt) in enumerate(requests):
        ask(manager, number, tokens, salt=salt)

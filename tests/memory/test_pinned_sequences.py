"""Pinned prefixes: held against eviction, counted, and never at the price of what was promised."""

from __future__ import annotations

import random

import pytest
from memory_pools import counts, full_manager, serve, window_manager

from jpaged.memory import NO_BLOCK, Fit, Need, PinnedSequences

TOKENS = list(range(100))


def pinned(manager, tokens, room=4, **options) -> PinnedSequences:
    pins = PinnedSequences(manager, room)
    serve(manager, 0, tokens)
    manager.free(0)
    assert pins.pin(50, tokens, **options)
    return pins


def test_pinned_blocks_are_not_evicted():
    manager = full_manager(8, prefix_caching=True)
    pinned(manager, TOKENS[:10])
    serve(manager, 1, [7] * 24)
    assert counts(manager) == (8, 0, 0)
    manager.free(1)
    assert serve(manager, 2, TOKENS[:10]) == 8


def test_unpinned_blocks_are_evicted_like_others():
    manager = full_manager(8, prefix_caching=True)
    pins = pinned(manager, TOKENS[:10])
    pins.unpin(50)
    assert counts(manager) == (0, 2, 8)
    serve(manager, 1, [7] * 32)
    manager.free(1)
    assert serve(manager, 2, TOKENS[:10]) == 0
    with pytest.raises(ValueError, match="prefix 50 is not pinned"):
        pins.unpin(50)


def test_a_prompt_of_whole_blocks_is_pinned_to_its_last_token():
    manager = full_manager(8, prefix_caching=True)
    pinned(manager, TOKENS[:8])
    assert manager.report().groups[0].pinned == 2
    assert "pinned blocks: full 2" in str(manager.report())


def test_every_group_keeps_what_prompts_that_go_on_will_read():
    manager = window_manager(9, window=4, prefix_caching=True)
    pinned(manager, TOKENS[:12])
    serve(manager, 1, [7] * 12)
    manager.free(1)
    assert serve(manager, 2, TOKENS[:14]) == 12
    assert [group.pinned for group in manager.report().groups] == [6, 2]


def test_prefixes_that_overlap_are_counted_as_their_tables_have_them_whichever_goes_first():
    manager, rng = window_manager(60, window=4, prefix_caching=True), random.Random(0)
    pins, held = PinnedSequences(manager, 4), []
    for seq_id in range(40):
        if held and rng.random() < 0.4:
            pins.unpin(held.pop(rng.randrange(len(held))))
        else:
            tokens = [*TOKENS[: rng.randrange(2, 13)], *[seq_id] * rng.randrange(7)]
            serve(manager, 1000, tokens)
            chains = manager.chains(1000, tokens) if seq_id % 2 else None
            assert pins.pin(seq_id, tokens, chains=chains)
            manager.free(1000)
            held.append(seq_id)
        pinned, pages = manager.parts.pinned, 0
        for g, size in enumerate(group.blocks_per_page for group in manager.layout.groups):
            blocks = {block for each in held for block in manager.block_table(each, g)} - {NO_BLOCK}
            assert manager.report().groups[g].pinned == len(blocks)
            pages += len({block // size for block in blocks})
        assert pinned.num_pages == pages and sorted(pinned.seq_ids) == sorted(held)
    manager.check_invariants()


def test_another_salt_pins_other_blocks():
    manager = full_manager(8, prefix_caching=True)
    pins = PinnedSequences(manager, 4)
    serve(manager, 0, TOKENS[:10], salt="a")
    manager.free(0)
    assert not pins.pin(50, TOKENS[:10])
    assert counts(manager) == (0, 2, 8) and pins.seq_ids == set()
    assert pins.pin(50, TOKENS[:10], "a")


def test_what_is_pinned_counts_as_lost_for_what_could_never_fit():
    manager = full_manager(8, prefix_caching=True)
    pins = pinned(manager, TOKENS[:10])
    assert manager.can_admit(Need(24)) is Fit.OK and manager.can_admit(Need(25)) is Fit.NEVER
    pins.unpin(50)
    assert manager.can_admit(Need(25)) is Fit.OK


def test_a_pin_that_leaves_no_room_for_the_longest_sequence_is_refused_and_holds_nothing():
    manager = full_manager(8, prefix_caching=True)
    with pytest.raises(ValueError, match="pinning the prompt's 8 tokens would leave too little of the pool of 8 large"):
        pinned(manager, TOKENS[:10], room=28)
    assert counts(manager) == (0, 2, 8) and manager.can_admit(Need(32)) is Fit.OK


def test_a_prefix_without_a_whole_block_or_a_cache_is_refused():
    with pytest.raises(ValueError, match="the prompt's 3 tokens are fewer than the 4 of a block"):
        PinnedSequences(full_manager(prefix_caching=True), 4).length(3)
    with pytest.raises(ValueError, match="enable_prefix_caching=True"):
        PinnedSequences(full_manager(), 4).length(10)


def test_the_prefix_cache_is_not_reset_while_a_prefix_is_pinned():
    manager = full_manager(8, prefix_caching=True)
    pins = pinned(manager, TOKENS[:10])
    assert not manager.reset_prefix_cache()
    pins.unpin(50)
    assert manager.reset_prefix_cache()

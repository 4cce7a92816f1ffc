"""Which prefixes hit, what a hit holds, and in which order cached blocks are lost."""

from __future__ import annotations

import pytest
from memory_pools import counts, full_manager, run, serve, window_manager

from jpaged.memory import NO_BLOCK, FullAttention, GroupSpec, MemoryManager, PoolLayout, SlidingWindow
from jpaged.memory.hash_chain import Link
from jpaged.memory.prefix_cache import PrefixCache, longest_prefix

TOKENS = list(range(100))


def caching(num_blocks=20, block_size=4):
    return full_manager(num_blocks, block_size, prefix_caching=True)


def hashed(manager, seq_id):
    """Blocks of a sequence whose content can be found."""
    return sum(manager.parts.cache.holds(0, block) for block in manager.block_table(seq_id, 0))


def owners(manager, block):
    return manager.parts.allocator.groups[0].ref_count[block]


def test_55_tokens_in_blocks_of_16_make_three_hashed_blocks_and_the_second_such_request_reuses_three():
    manager = caching(block_size=16)
    assert serve(manager, 0, TOKENS[:55]) == 0
    assert hashed(manager, 0) == 3
    assert serve(manager, 1, TOKENS[:55]) == 48
    table = manager.block_table(0, 0)
    assert manager.block_table(1, 0)[:3] == table[:3]
    assert [owners(manager, block) for block in table] == [2, 2, 2, 1]


def test_the_last_token_of_a_fully_cached_prompt_is_computed():
    manager = caching(block_size=4)
    serve(manager, 0, TOKENS[:8])
    manager.add(1, 1)
    assert manager.match_prefix(1, TOKENS[:8]) == 4
    manager.add(2, 2)
    assert manager.match_prefix(2, TOKENS[:9]) == 8


@pytest.mark.parametrize("tokens", [[], [0]])
def test_a_prompt_without_a_prefix_does_not_hit(tokens):
    manager = caching(block_size=1)
    serve(manager, 0, TOKENS[:4])
    manager.add(1, 1)
    assert manager.match_prefix(1, tokens) == 0


def test_free_order_is_never_used_first_then_tails_before_heads():
    manager = caching(num_blocks=8, block_size=4)
    serve(manager, 0, TOKENS[:20])
    cached = list(manager.block_table(0, 0))
    manager.free(0)
    manager.add(1, 1)
    manager.allocate(1, 32, first_write=0)
    taken = manager.block_table(1, 0)
    assert taken[:3] == [5, 6, 7]
    assert taken[3:] == cached[::-1]


def test_a_hit_on_a_freed_block_takes_it_out_of_the_free_list_before_anything_is_evicted():
    manager = caching(num_blocks=4, block_size=4)
    serve(manager, 0, TOKENS[:16])
    kept = list(manager.block_table(0, 0))
    manager.free(0)
    assert counts(manager) == (0, 4, 4)
    # Two hits and two new blocks: the tails go, the heads stay although they are just as evictable.
    assert serve(manager, 1, TOKENS[:8] + [7] * 8) == 8
    assert manager.block_table(1, 0) == [kept[0], kept[1], kept[3], kept[2]]


def test_a_reused_block_loses_its_hash():
    manager = caching(num_blocks=2, block_size=4)
    serve(manager, 0, TOKENS[:8])
    manager.free(0)
    serve(manager, 1, [9] * 8)
    manager.free(1)
    manager.add(2, 2)
    assert manager.match_prefix(2, TOKENS[:8]) == 0


def test_same_tokens_with_another_salt_do_not_hit():
    manager = caching()
    serve(manager, 0, TOKENS[:10], salt="a")
    assert serve(manager, 1, TOKENS[:10], salt="b") == 0
    assert serve(manager, 2, TOKENS[:10]) == 0
    assert serve(manager, 3, TOKENS[:10], salt="a") == 8


def test_a_bypassed_read_still_salts_what_is_written():
    manager = caching()
    assert serve(manager, 0, TOKENS[:10], salt="a", max_tokens=0) == 0
    assert serve(manager, 1, TOKENS[:10]) == 0
    assert serve(manager, 2, TOKENS[:10], salt="a") == 8


def test_max_tokens_bounds_the_hit():
    manager = caching(block_size=4)
    serve(manager, 0, TOKENS[:20])
    manager.add(1, 1)
    assert manager.match_prefix(1, TOKENS[:20], max_tokens=11) == 8


def test_without_prefix_caching_nothing_hits_and_nothing_stays():
    manager = full_manager(20)
    serve(manager, 0, TOKENS[:10])
    assert serve(manager, 1, TOKENS[:10]) == 0
    manager.free(0)
    manager.free(1)
    assert counts(manager) == (0, 0, 20)


def test_generated_blocks_are_cached_too():
    manager = caching(block_size=4)
    serve(manager, 0, TOKENS[:3])
    for length in range(4, 10):
        manager.allocate(0, length, first_write=length - 1)
    manager.commit(0, TOKENS[:9], 9)
    assert serve(manager, 1, TOKENS[:20]) == 8


def test_parent_and_child_of_a_fork_cache_their_own_blocks():
    manager = caching(block_size=4)
    serve(manager, 0, TOKENS[:6])
    manager.fork(0, 1)
    ends = [[*TOKENS[:6], *[seq_id + 60] * 6] for seq_id in (0, 1)]
    for seq_id in (0, 1):
        assert manager.allocate(seq_id, 12, first_write=6) is not None
    for seq_id in (0, 1):
        manager.commit(seq_id, ends[seq_id], 12)
    assert [hashed(manager, 0), hashed(manager, 1)] == [3, 3]
    for seq_id in (0, 1):
        assert serve(manager, seq_id + 2, [*ends[seq_id], 0]) == 12


def test_a_block_with_a_token_in_flight_is_cached_when_the_token_is_known():
    manager = caching(block_size=4)
    manager.add(0, 0)
    manager.allocate(0, 8, first_write=0)
    manager.commit(0, TOKENS[:7], 8)
    assert hashed(manager, 0) == 1
    manager.commit(0, TOKENS[:8], 8)
    assert hashed(manager, 0) == 2


def test_a_sequence_must_be_matched_before_it_has_blocks():
    manager = caching()
    serve(manager, 0, TOKENS[:5])
    with pytest.raises(RuntimeError, match="sequence 0 has blocks"):
        manager.match_prefix(0, TOKENS[:5])


def test_copy_on_write_and_hits_hold_at_once():
    manager = caching(block_size=4)
    serve(manager, 0, TOKENS[:10])
    serve(manager, 1, TOKENS[:10])
    manager.fork(1, 2)
    table = list(manager.block_table(1, 0))
    assert [owners(manager, block) for block in table] == [3, 3, 2]
    copies = manager.allocate(2, 11, first_write=10)
    assert [copy.src for copy in copies] == [table[2]]
    assert [owners(manager, block) for block in table] == [3, 3, 2], "the copy reads it until it is dispatched"
    manager.dispatched()
    assert [owners(manager, block) for block in table] == [3, 3, 1]


def test_an_overwritten_block_is_forgotten_and_found_under_its_new_content():
    manager = caching(block_size=4)
    serve(manager, 0, TOKENS[:12])
    rewound = TOKENS[:6] + [50] * 6
    run(manager, 0, rewound, start=6)
    assert serve(manager, 1, TOKENS[:13]) == 4
    assert serve(manager, 2, [*rewound, 0]) == 12


def test_tokens_are_compared_on_a_hit():
    cache = PrefixCache([(FullAttention(), 4)])
    cache.insert(0, 5, Link(b"digest", b"tokens"))
    assert cache.find(0, Link(b"digest", b"tokens")) == 5
    assert cache.find(0, Link(b"digest", b"others")) is None


def test_the_first_block_with_some_content_is_the_one_that_is_found():
    manager = caching(block_size=4)
    manager.add(0, 0)
    manager.add(1, 1)
    for seq_id in (0, 1):
        manager.allocate(seq_id, 4, first_write=0)
    for seq_id in (0, 1):
        manager.commit(seq_id, TOKENS[:4], 4)
    first = manager.block_table(0, 0)[0]
    manager.free(1)
    assert counts(manager)[:2] == (1, 0), "a duplicate is not kept"
    assert serve(manager, 2, TOKENS[:6]) == 4
    assert manager.block_table(2, 0)[0] == first


def test_reset_refuses_while_blocks_are_in_use():
    manager = caching()
    serve(manager, 0, TOKENS[:10])
    assert not manager.reset_prefix_cache()
    assert serve(manager, 1, TOKENS[:10]) == 8
    manager.free(0)
    manager.free(1)
    assert manager.reset_prefix_cache()
    assert counts(manager) == (0, 0, 20)
    assert serve(manager, 2, TOKENS[:10]) == 0


# Several groups.


def hits(text):
    return [c == "T" for c in text]


def test_the_hit_is_the_longest_length_valid_for_all_groups():
    full, window = (FullAttention(), 2), (SlidingWindow(4), 2)
    assert longest_prefix([window], [hits("TTFTFFTTFTTT")], 100) == 24
    assert longest_prefix([window], [hits("TTFTFFTTFFF")], 100) == 16
    assert longest_prefix([full, window], [hits("TTTTTTTTTTF"), hits("TTFTFFTTFTT")], 100) == 16
    assert longest_prefix([full, window], [hits("TTTTTTTF"), hits("TTFTFFTTFTT")], 100) == 4
    assert longest_prefix([full, window], [hits("TTTTTTTTT"), hits("TTFTFFTTF")], 15) == 4
    assert longest_prefix([full, window], [hits("FTT"), hits("TTT")], 100) == 0


def test_the_hit_divides_by_every_block_size():
    groups = [(FullAttention(), 4), (FullAttention(), 6)]
    assert longest_prefix(groups, [hits("TTTTT"), hits("TTT")], 100) == 12
    assert longest_prefix(groups, [hits("TTTTT"), hits("TTT")], 11) == 0


def test_a_window_attaches_only_what_it_still_reads():
    manager = window_manager(40, window=4, prefix_caching=True)
    serve(manager, 0, TOKENS[:12])
    manager.free(0)
    manager.add(1, 1)
    assert manager.match_prefix(1, TOKENS[:13]) == 12
    assert [block == NO_BLOCK for block in manager.block_table(1, 1)] == [True] * 4 + [False] * 2
    assert NO_BLOCK not in manager.block_table(1, 0)
    assert not manager.commit(1, TOKENS[:13], 12), "there is nothing left to release"


def test_with_two_groups_evicting_one_window_block_shortens_the_hit():
    manager = window_manager(40, window=4, prefix_caching=True)
    serve(manager, 0, TOKENS[:12])
    cache = manager.parts.cache
    link = manager.parts.sequences[0].chains[2].links[5]
    last = cache.find(1, link)
    manager.free(0)
    cache.forget(1, last)
    manager.add(1, 1)
    assert manager.match_prefix(1, TOKENS[:13]) == 10


def test_blocks_behind_the_window_are_lost_before_what_a_hit_needs():
    # Balanced eviction: the window's old blocks have not been needed for long, the rest goes tails first.
    manager = window_manager(40, window=4, prefix_caching=True)
    manager.add(0, 0)
    for length in range(2, 22, 2):
        run(manager, 0, TOKENS[:length], length - 2)
    cache = manager.parts.cache
    links = list(manager.parts.sequences[0].chains[2].links)
    manager.free(0)
    order = [cache.link(1, block) for block in manager.parts.allocator.groups[1].evictable]
    assert order == [*links[:8], links[9], links[8]]


def test_groups_lose_the_same_tokens():
    # Aligned eviction: among blocks released together the longest prefix goes first, in every group.
    manager = window_manager(40, window=50, prefix_caching=True)
    serve(manager, 0, TOKENS[:12])
    manager.free(0)
    pages = manager.parts.allocator.pages
    lost = []
    while (page := pages.oldest_idle()) is not None:
        lost.append(-pages.newest[page].negative_end)
        manager.evict_idle_page()
    # Group 0 has pages of 4 tokens, group 1 of 6; a page lives as long as its shortest prefix.
    assert lost == [10, 8, 6, 2, 2]


def test_gemmas_two_groups_are_evicted_in_the_order_of_last_need_and_within_it_from_the_end():
    """Balanced and aligned eviction together (Jenga, section 5) on Gemma's local and global layers.

    Windows of 4 tokens, blocks of 2, pages of one block. Request A has 10 tokens and B 6; then A's first 6 tokens
    are asked for again. First goes what A's window left behind and nobody needed again. Then what A needed at its end
    and the new request did not: A's end, from the last token, in both groups alike. Then B in the same order. Last goes
    what the new request needed: its whole prefix in the full group, but only the last window of it in the other.
    """
    specs = [
        GroupSpec(name, 8, 1, 2, policy) for name, policy in (("full", FullAttention()), ("win", SlidingWindow(4)))
    ]
    manager = MemoryManager(PoolLayout.plan(specs, 8 * 40), prefix_caching=True)
    content = {}
    for seq_id, name, tokens in ((0, "A", TOKENS[:10]), (1, "B", TOKENS[50:56])):
        manager.add(seq_id, seq_id)
        for end in range(2, len(tokens) + 1, 2):
            run(manager, seq_id, tokens[:end], end - 2)
            for g in (0, 1):
                content[g, manager.block_table(seq_id, g)[-1]] = f"{name}{end} {specs[g].name}"
        manager.free(seq_id)
    manager.add(2, 2)
    assert manager.match_prefix(2, TOKENS[:7]) == 6
    manager.free(2)
    lost, pages = [], manager.parts.allocator.pages
    while (page := pages.oldest_idle()) is not None:
        lost.append(content[pages.group[page], page])
        manager.evict_idle_page()
    assert lost == [
        "A2 win",
        *("A10 full", "A10 win", "A8 full", "A8 win"),
        "B2 win",
        *("B6 full", "B6 win", "B4 full", "B4 win", "B2 full"),
        *("A6 full", "A6 win", "A4 full", "A4 win", "A2 full"),
    ]


def test_a_fork_does_not_cache_its_blocks_as_its_parents_tokens_to_come():
    manager = full_manager(prefix_caching=True)
    manager.add(0, 0)
    manager.match_prefix(0, list(range(20)))  # names all 20 tokens
    run(manager, 0, list(range(5)))
    manager.fork(0, 1)
    run(manager, 1, [0, 1, 2, 3, 4, 77, 78, 79, 80, 81, 82, 83], start=5)
    manager.free(1)
    assert serve(manager, 2, list(range(20))) == 4
    assert serve(manager, 3, [0, 1, 2, 3, 4, 77, 78, 79, 80]) == 8


def test_the_fork_of_a_rewound_sequence_knows_what_the_blocks_it_shares_hold():
    manager = caching(block_size=4)
    for seq_id in (0, 1):  # computed twice: the cache finds the first's blocks only
        manager.add(seq_id, seq_id)
        manager.match_prefix(seq_id, TOKENS[:8], max_tokens=0)
        run(manager, seq_id, TOKENS[:8])
    manager.commit(1, TOKENS[:3], 3)  # as after rejected tokens: the blocks are not written again yet
    manager.fork(1, 2)
    for seq_id in (1, 0, 2):
        manager.free(seq_id)
    assert serve(manager, 3, TOKENS[:12]) == 8


# Content that is computed twice.


def generate(manager, seq_id, tokens, num_prompt):
    """A sequence from admission to its end, a token a step after its prompt; returns the cached tokens."""
    cached = serve(manager, seq_id, tokens[:num_prompt])
    for length in range(num_prompt + 1, len(tokens) + 1):
        run(manager, seq_id, tokens[:length], length - 1)
    manager.free(seq_id)
    manager.check_invariants()
    return cached


def test_a_prompt_computed_again_as_its_windows_were_lost_hits_the_next_time():
    # Gemma-like: the first output runs on until the windows of its prompt are evicted; full attention loses nothing.
    manager = window_manager(14, window=4, prefix_caching=True, watermark=0)
    assert generate(manager, 0, TOKENS[:40], num_prompt=20) == 0
    assert generate(manager, 1, TOKENS[:21], num_prompt=20) == 0, "no window of the prompt is left"
    assert generate(manager, 2, TOKENS[:21], num_prompt=20) == 18


def test_an_equal_block_takes_the_place_of_one_that_nobody_uses():
    manager = caching(num_blocks=6)
    serve(manager, 0, TOKENS[:8])
    old = list(manager.block_table(0, 0))
    manager.free(0)
    serve(manager, 1, TOKENS[:8], max_tokens=0)
    new = list(manager.block_table(1, 0))
    assert not set(old) & set(new)
    assert counts(manager) == (2, 0, 4), "the old blocks are empty at once"
    assert serve(manager, 2, TOKENS[:9]) == 8
    assert manager.block_table(2, 0)[:2] == new
    manager.check_invariants()


def test_of_two_equal_blocks_the_one_needed_last_stays():
    manager = caching(num_blocks=6)
    for seq_id in (0, 1):
        manager.add(seq_id, seq_id)
        manager.allocate(seq_id, 4, first_write=0)
    for seq_id in (0, 1):
        manager.commit(seq_id, TOKENS[:4], 4)
    (last,) = manager.block_table(1, 0)
    manager.free(0)
    serve(manager, 2, TOKENS[10:14])
    manager.free(2)
    manager.free(1)
    assert counts(manager) == (0, 2, 6)
    assert list(manager.parts.allocator.groups[0].evictable)[-1] == last
    assert serve(manager, 3, TOKENS[:6]) == 4
    manager.check_invariants()


def test_what_is_pinned_keeps_its_place():
    manager = caching(num_blocks=6)
    serve(manager, 0, TOKENS[:8])
    held = list(manager.block_table(0, 0))
    manager.pin(0)
    serve(manager, 1, TOKENS[:8], max_tokens=0)
    manager.free(1)
    assert serve(manager, 2, TOKENS[:9]) == 8
    assert manager.block_table(2, 0)[:2] == held

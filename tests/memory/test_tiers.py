"""Which evicted blocks go to disk, under which names, and what is known of them when."""

from __future__ import annotations

import pytest
from fake_store import FakeStore
from hypothesis import given
from hypothesis import strategies as st
from memory_pools import run, serve
from small_schedulers import group, layout_of

from jpaged.cache_retention import read_retention
from jpaged.memory import MemoryManager, Tier, TierFill, Tiers, TierWrite
from jpaged.memory.hash_chain import Link
from jpaged.memory.tiers import BreakEven, prefetch
from jpaged.memory.tiers.tier import BACKLOG_BYTES

LAYOUT = layout_of([group()], 8)
TOKENS = list(range(16))


def make_tier(disk: FakeStore, *, pages: int = 100) -> Tiers:
    even = BreakEven(latency=0.0, read_rate=1.0, min_tokens=1)
    return Tiers([Tier("disk", LAYOUT, disk, pages * LAYOUT.page_bytes, 1, even)])


@pytest.fixture
def disk():
    return FakeStore()


@pytest.fixture
def memory(disk):
    """A pool of eight blocks that holds four cached ones of `TOKENS`, and a disk without any."""
    memory = MemoryManager(LAYOUT, prefix_caching=True, tiers=make_tier(disk))
    memory.add(0, 0)
    memory.match_prefix(0, TOKENS)
    run(memory, 0, TOKENS)
    memory.free(0)
    return memory


def take_moves(memory: MemoryManager) -> tuple[list[TierWrite], list[TierFill]]:
    """End the planning of a step, and dispatch it."""
    moves = memory.tiers.take_writes(), memory.tiers.take_fills()
    memory.dispatched()
    return moves


def fill_pool(memory: MemoryManager, seq_id: int = 1) -> None:
    """Take all blocks, whoever has cached something in them."""
    memory.add(seq_id, seq_id)
    assert memory.allocate(seq_id, 32, first_write=0) is not None


def test_what_a_step_evicts_is_written_under_a_name_and_found_from_the_next_step_on(memory):
    memory.tiers.begin_step()
    fill_pool(memory)
    memory.read_ahead(2, [*TOKENS, 1], 0.0)
    assert not memory.tiers.prefetch.staged(2), "it is not on its way yet"
    writes, fills = take_moves(memory)
    assert len(writes) == 4 and not fills
    assert len({write.place for write in writes}) == len({write.name for write in writes}) == 4
    memory.read_ahead(3, [*TOKENS, 1], 0.0)
    memory.tiers.prefetch.waits_for(3, 0.0)
    assert memory.tiers.stats()["disk"].failures == 4, "the fake disk was not given the writes"


def test_what_is_lost_between_two_steps_is_not_written(memory):
    fill_pool(memory)
    assert take_moves(memory) == ([], []) and memory.tiers.stats()["disk"].num_blocks == 0


def test_a_block_that_comes_from_host_memory_in_this_step_is_not_written(memory):
    memory.tiers.begin_step()
    memory._step.filled.update((0, block) for block in range(8))
    fill_pool(memory)
    assert take_moves(memory) == ([], [])


def test_a_block_that_comes_from_disk_in_this_step_is_neither_filled_nor_written_when_its_prompt_goes(memory, disk):
    memory.tiers.begin_step()
    fill_pool(memory)
    writes, _ = take_moves(memory)
    for write in writes:
        disk.write(write.place, write.name, b"there")
    memory.free(1)
    memory.tiers.begin_step()
    memory.read_ahead(2, [*TOKENS, 1], 0.0)
    memory.tiers.prefetch.waits_for(2, 0.0)
    memory.add(2, 2)
    assert memory.match_prefix(2, [*TOKENS, 1], from_tiers=True) == len(TOKENS)
    memory.free(2)
    fill_pool(memory, 3)
    assert take_moves(memory) == ([], []) and not memory._step.filled


def test_a_disk_that_cannot_keep_up_is_given_no_more(memory, disk):
    disk.num_queued_bytes = BACKLOG_BYTES
    memory.tiers.begin_step()
    fill_pool(memory)
    assert take_moves(memory) == ([], []) and memory.tiers.stats()["disk"].skipped == 4


def test_a_disk_that_failed_is_left_alone(memory, disk):
    disk.is_open = False
    memory.tiers.begin_step()
    fill_pool(memory)
    assert take_moves(memory) == ([], [])
    memory.read_ahead(2, [*TOKENS, 1], 0.0)
    assert memory.tiers.prefetch.waits_for(2, 0.0) is None and not memory.tiers.stats()["disk"].is_open


def test_a_request_that_cannot_take_what_was_read_begins_with_what_the_pool_has(disk):
    layout = layout_of([group("full"), group("state", interval=8)], 12)
    tier = Tier("disk", layout, disk, 100 * layout.page_bytes, 1, BreakEven(latency=0.0, read_rate=1.0, min_tokens=1))
    memory, prompt = MemoryManager(layout, prefix_caching=True, tiers=Tiers([tier])), list(range(25))

    serve(memory, 0, prompt[:24])
    memory.free(0)
    memory.tiers.begin_step()
    memory.add(1, 1)
    assert memory.allocate(1, 32, first_write=0) is not None
    for write in take_moves(memory)[0]:
        disk.write(write.place, write.name, b"there")
    memory.free(1)
    serve(memory, 2, prompt[:8])
    memory.add(3, 3)
    assert memory.allocate(3, 24, first_write=0) is not None
    memory.tiers.begin_step()
    memory.read_ahead(4, prompt, 0.0)
    memory.tiers.prefetch.waits_for(4, 0.0)
    assert len(memory.tiers.prefetch.staged(4)) == 5
    memory.add(4, 4)
    assert memory.match_prefix(4, prompt, from_tiers=True) == 8
    assert memory.parts.sequences[4].request.begun == (8, 24)
    memory.free(3)
    run(memory, 4, prompt, 8)
    memory.check_invariants()


def test_other_weights_have_other_names(memory):
    def names(seq_id):
        memory.tiers.begin_step()
        fill_pool(memory, seq_id)
        written = take_moves(memory)[0]
        memory.free(seq_id)
        return {write.name for write in written}

    before = names(1)
    memory.new_generation()
    assert memory.tiers.stats()["disk"].num_blocks == 0
    memory.add(0, 0)
    memory.match_prefix(0, TOKENS)
    run(memory, 0, TOKENS)
    memory.free(0)
    after = names(1)
    assert len(before) == len(after) == 4 and not before & after


def test_reading_ahead_is_bounded_and_the_next_request_comes_first():
    disk = FakeStore(delay=1)
    memory = MemoryManager(LAYOUT, prefix_caching=True, tiers=make_tier(disk))
    prompts = [[which] * 8 + [1] for which in range(3)]  # two blocks each; a quarter of the pool is two blocks
    for which, prompt in enumerate(prompts):
        memory.add(which, which)
        memory.match_prefix(which, prompt)
        run(memory, which, prompt)
        memory.free(which)
    memory.tiers.begin_step()
    fill_pool(memory, 9)
    for write in take_moves(memory)[0]:
        disk.write(write.place, write.name, ["content"])
    memory.read_ahead(10, prompts[0], 0.0)
    memory.read_ahead(11, prompts[1], 0.0)
    assert memory.tiers.prefetch.waits_for(10, 0.0) and memory.tiers.prefetch.waits_for(11, 0.0) is None
    memory.read_ahead(12, prompts[2], 0.0, is_next=True)
    assert memory.tiers.prefetch.waits_for(12, 0.0) and memory.tiers.prefetch.waits_for(10, 0.0) is None
    disk.step()
    memory.tiers.prefetch.waits_for(12, 0.0)
    assert len(memory.tiers.prefetch.staged(12)) == 2 and memory.tiers.stats()["disk"].failures == 0
    memory.tiers.prefetch.let_go(12)
    memory.check_invariants()


def test_a_waiting_request_is_looked_up_again_only_after_its_own_prefix_changed(memory, monkeypatch):
    looked, named = [], []
    missing = prefetch.Prefetch._missing
    monkeypatch.setattr(prefetch.Prefetch, "_missing", lambda *args: looked.append(1) or missing(*args))

    def times() -> int:
        before = len(looked)
        memory.read_ahead(9, [*TOKENS, 1], 0.0, contents=lambda: named.append(1) or (), is_next=True)
        assert len(named) == len(looked), "what it will hold is named for that only"
        return len(looked) - before

    memory.tiers.each[0].index.put(0, Link(b"another", b""))  # an empty tier is not asked
    assert [times(), times()] == [1, 0]
    memory.add(1, 1)
    memory.match_prefix(1, [77] * 20)
    run(memory, 1, [77] * 16)  # takes the four empty blocks
    memory.free(1)
    assert times() == 0, "nothing was lost"
    memory.tiers.begin_step()
    fill_pool(memory, 2)  # evicts all
    assert times() == 1, "the pool lost it"
    assert times() == 0
    take_moves(memory)
    assert times() == 1, "the tier can read it since"


@given(st.lists(st.tuples(st.sampled_from("alc"), st.integers(0, 5)), max_size=40))
def test_no_change_of_a_prefix_is_overlooked(steps):
    changes, since, mine = prefetch.ChangedContents(), 0, False
    names = frozenset({b"1", b"2"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "MOST_CHANGES", 4)
        for what, number in steps:
            if what == "a":
                changes.add(b"%d" % number)
                mine |= b"%d" % number in names
            elif what == "c":
                changes.add_all()
                mine = True
            else:
                assert changes.concern(names, since) >= mine
                since, mine = changes.end, False
                assert not changes.concern(names, since)


def test_content_that_comes_back_to_its_place_within_a_step_is_written_once():
    tiers, (one, other) = make_tier(FakeStore(), pages=1), (Link(bytes([n]) * 16, b"") for n in (1, 2))
    full = LAYOUT.groups[0].blocks_per_page
    tiers.begin_step()
    for block, link in enumerate([one, *[other._replace(digest=bytes([9, n])) for n in range(full)], one]):
        tiers.evicted(0, block, link)
    writes = tiers.take_writes()
    assert len({write.place for write in writes}) == len(writes)
    assert writes[-1].block == full + 1, "the block that was evicted last has the content"


def flooded(disk: FakeStore, *kept, pages: int = 12, **limits) -> list[bool]:
    """Run prompts in a small pool, then many others; return which of the first ones the tier still has.

    Args:
        kept: for each prompt its salt and what it asks of the prefix cache.
    """
    even = BreakEven(latency=0.0, read_rate=1.0, min_tokens=1)
    tier = Tier("disk", LAYOUT, disk, pages * LAYOUT.page_bytes, 1, even, at_fill=True, **limits)
    memory = MemoryManager(LAYOUT, prefix_caching=True, tiers=Tiers([tier]))

    def once(number: int, salt: str | None, asked: list[tuple[int, int | None, int]] | None) -> None:
        tokens = [number] * 16
        memory.tiers.begin_step()
        memory.add(number, number, retention=read_retention(asked, None))
        memory.match_prefix(number, tokens, salt=salt)
        run(memory, number, tokens)
        memory.free(number)
        take_moves(memory)
        memory.tiers.begin_step()
        take_moves(memory)
        memory.tiers.check()

    for number, (salt, asked) in enumerate(kept):
        once(number, salt, asked)
    others = "other" if limits else None
    for number in range(len(kept), len(kept) + 20):
        once(number, others, None)
    left = []
    for number, (salt, _) in enumerate(kept):
        (chain,) = memory.parts.cache.chains(salt).values()
        chain.extend([number] * 16, 4)
        left.append(all(tier.index.readable(0, chain.links)))
    return left


def test_priorities_of_retention_hold_in_a_tier(disk):
    high, low, default = [(0, None, 80)], [(0, None, 1)], None
    assert flooded(disk, (None, high), (None, default), (None, low)) == [True, False, False]


def test_a_salts_limit_holds_in_a_tier(disk):
    limit = 4 * LAYOUT.groups[0].block_bytes
    assert flooded(disk, (None, None), ("mine", None), salt_bytes=limit) == [True, True]

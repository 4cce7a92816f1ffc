"""Which evicted blocks go to disk, under which names, and what is known of them when."""

from __future__ import annotations

import pytest
from fake_disk import FakeDisk
from memory_pools import run
from small_schedulers import group, layout_of

from jpaged.memory import DiskFill, DiskTier, DiskWrite, MemoryManager
from jpaged.memory.disk import BreakEven
from jpaged.memory.disk.tier import BACKLOG_BYTES

LAYOUT = layout_of([group()], 8)
TOKENS = list(range(16))


def make_tier(disk: FakeDisk, *, pages: int = 100) -> DiskTier:
    even = BreakEven(latency=0.0, read_rate=1.0, min_tokens=1)
    return DiskTier(LAYOUT, disk, num_bytes=pages * LAYOUT.page_bytes, shards=1, break_even=even)


@pytest.fixture
def disk():
    return FakeDisk()


@pytest.fixture
def memory(disk):
    """A pool of eight blocks that holds four cached ones of `TOKENS`, and a disk without any."""
    memory = MemoryManager(LAYOUT, prefix_caching=True, disk=make_tier(disk))
    memory.add(0, 0)
    memory.match_prefix(0, TOKENS)
    run(memory, 0, TOKENS)
    memory.free(0)
    return memory


def take_moves(memory: MemoryManager) -> tuple[list[DiskWrite], list[DiskFill]]:
    """End the planning of a step, and dispatch it."""
    moves = memory.disk.take_writes(), memory.disk.take_fills()
    memory.dispatched()
    return moves


def fill_pool(memory: MemoryManager, seq_id: int = 1) -> None:
    """Take all blocks, whoever has cached something in them."""
    memory.add(seq_id, seq_id)
    assert memory.allocate(seq_id, 32, first_write=0) is not None


def test_what_a_step_evicts_is_written_under_a_name_and_found_from_the_next_step_on(memory):
    memory.disk.begin_step()
    fill_pool(memory)
    memory.read_ahead(2, [*TOKENS, 1], 0.0)
    assert not memory.disk.prefetch.staged(2), "it is not on its way yet"
    writes, fills = take_moves(memory)
    assert len(writes) == 4 and not fills
    assert len({write.place for write in writes}) == len({write.name for write in writes}) == 4
    memory.read_ahead(3, [*TOKENS, 1], 0.0)
    memory.disk.prefetch.waits_for(3, 0.0)
    assert memory.disk.stats().failures == 4, "the fake disk was not given the writes"


def test_what_is_lost_between_two_steps_is_not_written(memory):
    fill_pool(memory)
    assert take_moves(memory) == ([], []) and memory.disk.stats().num_blocks == 0


def test_a_block_that_comes_from_host_memory_in_this_step_is_not_written(memory):
    memory.disk.begin_step()
    memory._step.filled.update((0, block) for block in range(8))
    fill_pool(memory)
    assert take_moves(memory) == ([], [])


def test_a_block_that_comes_from_disk_in_this_step_is_neither_filled_nor_written_when_its_prompt_goes(memory, disk):
    memory.disk.begin_step()
    fill_pool(memory)
    writes, _ = take_moves(memory)
    for write in writes:
        disk.write(write.place, write.name, b"there")
    memory.free(1)
    memory.disk.begin_step()
    memory.read_ahead(2, [*TOKENS, 1], 0.0)
    memory.disk.prefetch.waits_for(2, 0.0)
    memory.add(2, 2)
    assert memory.match_prefix(2, [*TOKENS, 1], from_disk=True) == len(TOKENS)
    memory.free(2)
    fill_pool(memory, 3)
    assert take_moves(memory) == ([], []) and not memory._step.filled


def test_a_disk_that_cannot_keep_up_is_given_no_more(memory, disk):
    disk.num_queued_bytes = BACKLOG_BYTES
    memory.disk.begin_step()
    fill_pool(memory)
    assert take_moves(memory) == ([], []) and memory.disk.stats().skipped == 4


def test_a_disk_that_failed_is_left_alone(memory, disk):
    disk.is_open = False
    memory.disk.begin_step()
    fill_pool(memory)
    assert take_moves(memory) == ([], [])
    memory.read_ahead(2, [*TOKENS, 1], 0.0)
    assert memory.disk.prefetch.waits_for(2, 0.0) is None and not memory.disk.stats().is_open


def test_other_weights_have_other_names(memory):
    def names(seq_id):
        memory.disk.begin_step()
        fill_pool(memory, seq_id)
        written = take_moves(memory)[0]
        memory.free(seq_id)
        return {write.name for write in written}

    before = names(1)
    memory.clear()
    memory.add(0, 0)
    memory.match_prefix(0, TOKENS)
    run(memory, 0, TOKENS)
    memory.free(0)
    after = names(1)
    assert len(before) == len(after) == 4 and not before & after


def test_reading_ahead_is_bounded_and_the_next_request_comes_first():
    disk = FakeDisk(delay=1)
    memory = MemoryManager(LAYOUT, prefix_caching=True, disk=make_tier(disk))
    prompts = [[which] * 8 + [1] for which in range(3)]  # two blocks each; a quarter of the pool is two blocks
    for which, prompt in enumerate(prompts):
        memory.add(which, which)
        memory.match_prefix(which, prompt)
        run(memory, which, prompt)
        memory.free(which)
    memory.disk.begin_step()
    fill_pool(memory, 9)
    for write in take_moves(memory)[0]:
        disk.write(write.place, write.name, ["content"])
    memory.read_ahead(10, prompts[0], 0.0)
    memory.read_ahead(11, prompts[1], 0.0)
    assert memory.disk.prefetch.waits_for(10, 0.0) and memory.disk.prefetch.waits_for(11, 0.0) is None
    memory.read_ahead(12, prompts[2], 0.0, is_next=True)
    assert memory.disk.prefetch.waits_for(12, 0.0) and memory.disk.prefetch.waits_for(10, 0.0) is None
    disk.step()
    memory.disk.prefetch.waits_for(12, 0.0)
    assert len(memory.disk.prefetch.staged(12)) == 2 and memory.disk.stats().failures == 0
    memory.disk.prefetch.let_go(12)
    memory.check_invariants()

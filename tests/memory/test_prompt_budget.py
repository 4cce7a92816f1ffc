"""Layers that keep a fixed number of a prompt's tokens: what they hold before, at and after the prompt's end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged.memory import Fit, FullAttention, GroupSpec, MemoryManager, Need, PoolLayout, PromptBudget
from jpaged.memory.policies import UNBOUNDED

SIZE = 4
BUDGETS = (4, 8, 16)
EIGHT = PromptBudget(8).for_request(0, 21)


def manager(num_blocks: int = 60, *policies) -> MemoryManager:
    """A group for each of the budgets (or policies), blocks of 4 tokens, one a large page."""
    of = policies or [PromptBudget(budget) for budget in BUDGETS]
    specs = [GroupSpec(str(g), 8, 1, SIZE, policy) for g, policy in enumerate(of)]
    return MemoryManager(PoolLayout.plan(specs, 8 * num_blocks), watermark=0)


def compute(memory: MemoryManager, seq_id: int, start: int, stop: int) -> None:
    assert memory.allocate(seq_id, stop, first_write=start) is not None
    memory.commit(seq_id, [], stop)


def held(memory: MemoryManager, seq_id: int) -> list[int]:
    return [len(memory.block_table(seq_id, g)) for g in range(len(memory.layout.groups))]


def test_a_prompt_is_held_whole_until_its_end_then_the_budget_and_what_follows():
    memory = manager()
    memory.add(0, 0, prompt_tokens=21)
    compute(memory, 0, 0, 10)
    assert held(memory, 0) == [3, 3, 3]
    assert memory.allocate(0, 21, first_write=10) == [] and held(memory, 0) == [6, 6, 6]
    memory.commit(0, [], 21)
    assert held(memory, 0) == [1, 2, 4]
    compute(memory, 0, 21, 22)
    assert held(memory, 0) == [2, 3, 5]
    compute(memory, 0, 22, 26)
    assert held(memory, 0) == [3, 4, 6]
    assert [group.token_bytes for group in memory.report().groups] == [(n + 5) * 8 // SIZE for n in BUDGETS]


def test_a_prompt_within_the_budget_is_plain_full_attention():
    kept, full = PromptBudget(8).for_request(0, 8), FullAttention()
    for length in range(30):
        assert kept.num_blocks(length, SIZE) == full.num_blocks(length, SIZE)
        assert kept.active_blocks(length, SIZE) == full.active_blocks(length, SIZE)
        assert kept.capacity(3, SIZE, length) == 3 * SIZE and kept.most_blocks(length, SIZE) == UNBOUNDED
        assert kept.written_blocks(length, length + 3, SIZE) == full.written_blocks(length, length + 3, SIZE)


def test_the_end_of_the_prompt_and_the_token_behind_it_have_to_be_allocated():
    assert EIGHT.capacity(6, SIZE, 18) == 20
    assert EIGHT.capacity(6, SIZE, 21) == EIGHT.capacity(2, SIZE, 21) == 21
    assert EIGHT.capacity(3, SIZE, 22) == 21 + 4


def test_the_step_that_ends_the_prompt_writes_every_block_and_later_ones_the_slots_behind_those_kept():
    assert list(EIGHT.written_blocks(18, 20, SIZE)) == [4]
    assert list(EIGHT.written_blocks(18, 21, SIZE)) == [0, 1, 2, 3, 4, 5]
    assert list(EIGHT.written_blocks(21, 22, SIZE)) == [2]
    assert list(EIGHT.written_blocks(24, 26, SIZE)) == [2, 3]


def test_the_peak_is_the_whole_prompt_or_what_is_held_at_the_end():
    assert [EIGHT.peak_blocks(length, 5, SIZE) for length in (10, 21, 22, 34, 60)] == [3, 6, 6, 6, 12]


def test_nothing_is_ever_a_prefix_of_another_request():
    assert list(EIGHT.possible_prefix([True] * 3, SIZE)) == [0] and EIGHT.full_blocks(21, 21, SIZE) == 0


def test_a_request_is_refused_for_good_only_where_its_whole_prompt_does_not_fit():
    memory = manager(18, PromptBudget(4), PromptBudget(8))
    assert memory.can_admit(Need(36, prompt_tokens=36)) is Fit.OK
    assert memory.can_admit(Need(37, prompt_tokens=37)) is Fit.NEVER
    assert memory.can_admit(Need(24 + 30, prompt_tokens=24)) is Fit.NEVER
    assert memory.can_admit(Need(24 + 26, prompt_tokens=24)) is Fit.OK, "9 and 8 blocks at the end"


def test_forks_share_what_is_kept_and_copy_only_a_partly_filled_tail():
    memory = manager(60, PromptBudget(8))
    memory.add(0, 0, prompt_tokens=21)
    compute(memory, 0, 0, 21)
    memory.fork(0, 1)
    for seq_id in (0, 1):
        compute(memory, seq_id, 21, 22)
    tables = [memory.block_table(seq_id, 0) for seq_id in (0, 1)]
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]
    memory.fork(0, 2)
    (copy,) = memory.allocate(2, 23, first_write=22)
    assert (copy.src, copy.dst) == (tables[0][2], memory.block_table(2, 0)[2])


def test_a_fork_before_the_parent_gave_its_dropped_blocks_up_gives_them_up_itself():
    memory = manager(60, PromptBudget(8))
    memory.add(0, 0, prompt_tokens=21)
    assert memory.allocate(0, 21, first_write=0) == []
    memory.fork(0, 1)
    for seq_id in (0, 1):
        memory.commit(seq_id, [], 21)
    assert held(memory, 0) == held(memory, 1) == [2] and memory.num_used_blocks == 2


def test_a_budget_of_no_token_raises():
    with pytest.raises(ValueError, match="budget=0 must be at least 1 token"):
        PromptBudget(0)


def expected_blocks(budget: int, prompt: int, length: int) -> int:
    slots = length if length < prompt else length - max(0, prompt - budget)
    return -(-slots // SIZE)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_random_lives_hold_exactly_their_slots_and_leak_nothing(data):
    memory = manager(num_blocks=data.draw(st.integers(30, 90)))
    lives: dict[int, tuple[int, int, int]] = {}  # request, prompt, computed
    for new in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "grow", "grow", "grow", "fork", "free"]))
        if action == "add" or not lives:
            lives[new] = (new, data.draw(st.integers(1, 40)), 0)
            memory.add(new, new, prompt_tokens=lives[new][1])
            continue
        seq_id = data.draw(st.sampled_from(sorted(lives)))
        request, prompt, computed = lives[seq_id]
        if action == "free":
            memory.free(seq_id)
            del lives[seq_id]
        elif action == "fork" and computed >= prompt:
            memory.fork(seq_id, new)
            lives[new] = lives[seq_id]
        elif action == "grow":
            most = prompt - computed if computed < prompt else 9
            end = computed + data.draw(st.integers(1, most))
            before = memory.num_used_blocks
            if memory.allocate(seq_id, end, first_write=computed) is None:
                assert memory.num_used_blocks == before
            else:
                memory.dispatched()
                memory.commit(seq_id, [], end)
                lives[seq_id] = (request, prompt, end)
        memory.check_invariants()
        for s, (_, its_prompt, length) in lives.items():
            assert held(memory, s) == [expected_blocks(budget, its_prompt, length) for budget in BUDGETS]
    for seq_id in lives:
        memory.free(seq_id)
    memory.check_invariants()
    assert memory.num_used_blocks == 0 and memory.report().free_pages == memory.layout.num_pages

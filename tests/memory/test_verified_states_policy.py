"""The ring of states of a sequence that verifies drafts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.memory import BlockCopy, GroupSpec, MemoryManager, PoolLayout, StateCheckpoints
from jpaged.memory.policies import VerifiedStates

SIZE, INTERVAL, SLOTS, RING = 4, 16, 3, 1
TOKENS = list(range(100))


def manager(**options) -> MemoryManager:
    groups = [
        GroupSpec("state", 8, 1, SIZE, StateCheckpoints(INTERVAL)),
        GroupSpec("state.verified", 8, 1, SIZE, VerifiedStates(SLOTS)),
    ]
    return MemoryManager(PoolLayout.plan(groups, 8 * 40), watermark=0, prefix_caching=True, **options)


def compute(memory: MemoryManager, seq_id: int, length: int, first: int = 0) -> list[BlockCopy]:
    copies = memory.allocate(seq_id, length, first_write=first)
    assert copies is not None
    memory.commit(seq_id, TOKENS, length)
    memory.check_invariants()
    return copies


@given(st.integers(1, 9), st.integers(0, 200), st.integers(1, 9))
def test_a_token_and_its_drafts_leave_states_in_entries_of_their_own(slots, length, tokens):
    entries = [n % slots for n in range(length + 1, length + 1 + min(tokens, slots))]
    assert len(set(entries)) == len(entries)
    assert set(entries) <= set(VerifiedStates(slots).written_blocks(length, length + tokens, SIZE))


def test_a_sequence_has_as_many_states_as_slots_from_its_first_token_to_its_end():
    memory = manager()
    memory.add(0, 0)
    for first, length in ((0, 1), (1, 2), (2, 50)):
        compute(memory, 0, length, first)
        assert len(set(memory.block_table(0, RING))) == SLOTS
    memory.free(0)
    assert memory.num_used_blocks == 0


def test_a_fork_copies_the_state_that_it_goes_on_from_and_no_other():
    memory = manager()
    memory.add(0, 0)
    compute(memory, 0, 20)
    memory.fork(0, 1)
    old = memory.block_table(0, RING)[20 % SLOTS]
    copies = [copy for copy in compute(memory, 1, 21, 20) if copy.group == RING]
    assert copies == [BlockCopy(RING, old, memory.block_table(1, RING)[20 % SLOTS])]
    assert not set(memory.block_table(0, RING)) & set(memory.block_table(1, RING))
    assert not [copy for copy in compute(memory, 0, 21, 20) if copy.group == RING], "the last owner writes in place"


def test_a_hit_ends_at_a_checkpoint_and_brings_no_state_of_drafts_along():
    memory = manager()
    memory.add(0, 0)
    compute(memory, 0, 40)
    memory.free(0)
    memory.add(1, 1)
    assert memory.match_prefix(1, TOKENS[:60]) == 32
    assert list(memory.block_table(1, RING)) == []
    compute(memory, 1, 33, 32)
    assert len(memory.block_table(1, RING)) == SLOTS


def test_a_ring_without_a_slot_is_refused():
    with pytest.raises(ValueError, match="slots=0 must be at least 1 state"):
        VerifiedStates(0)

"""Units of a step: run one after the other, they leave in every block the state that tokens one by one would."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged.execution.caches.base import HostStep
from jpaged.execution.caches.state import StateBatch, StateTables, state_batch, token_by_token
from jpaged.memory import GroupSpec, PoolLayout, StateCheckpoints
from jpaged.memory.layout import GroupLayout
from jpaged.scheduling import ScheduledStep
from pallas_kernels.recurrent.layout import CARRY, NEW, UNIT

SIZE, ROWS = 16, 64


def plan_of(interval: int, spacing: int) -> GroupLayout:
    spec = GroupSpec("state", 4, 1, SIZE, StateCheckpoints(interval, spacing=spacing))
    return PoolLayout.plan([spec], 4000).groups[0]


class Case:
    """A step of some sequences' chunks, with tables as the memory makes them.

    Args:
        intervals: how many intervals lie between checkpoints inside a prompt; prompts end anywhere in a chunk.
        slots: entries of each sequence's ring; then chunks that are no longer are a token and its drafts. 0 = no ring.

    Attributes:
        pool: state in each block before the step: the positions of the tokens up to there.
        expected: what the blocks hold after it, in as far as somebody will read them.
    """

    def __init__(
        self,
        interval: int,
        chunks: list[tuple[int, int, tuple[int, ...]]],
        padding: int = 0,
        slots: int = 0,
        intervals: int = 1,
    ) -> None:
        spacing = interval * intervals
        chunks = sorted(chunks, key=lambda chunk: (chunk[1] > 1, chunk[1] > slots))
        self.drafts = [length - 1 if 1 < length <= slots else 0 for _, length, _ in chunks]
        self.plan, blocks = plan_of(interval, spacing), iter(np.random.default_rng(0).permutation(900).tolist())
        self.starts = np.array([chunk[0] for chunk in chunks], np.int32)
        self.lengths = np.array([chunk[1] for chunk in chunks], np.int32)
        width = max(start + length + spacing for start, length, _ in chunks) // SIZE + 1
        self.table = np.full((len(chunks), width), -1, np.int32)
        self.ring = np.array([[next(blocks) for _ in range(slots)] for _ in chunks], np.int32) if slots else None
        self.pool: dict[int, tuple[int, int]] = {}
        self.expected: dict[int, tuple[int, int]] = {}
        for number, (start, length, ends) in enumerate(chunks):
            stop = start + length
            policy = StateCheckpoints(interval, ends, spacing).for_request(0, start + length * (number % 3) // 2)
            assert isinstance(policy, StateCheckpoints)
            (held,) = policy.active_blocks(start, SIZE)
            for entry in policy.placed(range(held.start, policy.num_blocks(stop, SIZE)), SIZE):
                block = self.table[number, entry] = next(blocks)
                if entry in held and start and not slots:
                    self.pool[block] = (number, start)
                if (entry + 1) * SIZE <= stop and (entry + 1) * SIZE > start:
                    self.expected[block] = (number, (entry + 1) * SIZE)
            if self.ring is None:
                (running,) = policy.active_blocks(stop, SIZE)
                self.expected[self.table[number, running.start]] = (number, stop)
                continue
            for length in (start, *range(stop - self.drafts[number], stop + 1)):
                ends = policy.end_after(length) == length
                block = self.table[number, length // SIZE - 1] if ends else self.ring[number, length % slots]
                (self.expected if length > start else self.pool)[block] = (number, length)
        tokens = int(self.lengths.sum())
        self.seq_of_token = np.repeat(np.arange(len(chunks)), self.lengths)
        first = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        self.positions = np.arange(tokens) - first[self.seq_of_token] + self.starts[self.seq_of_token]
        # A draft takes a row of the batch, as a sequence does.
        self.padded = (tokens + padding, len(chunks) + sum(self.drafts) + padding)

    def batch(self) -> StateBatch:
        chunks = [SimpleNamespace(drafts=(7,) * drafts) for drafts in self.drafts]
        step = HostStep(
            ScheduledStep(chunks), self.starts, self.lengths, self.seq_of_token, self.positions, *self.padded
        )
        return state_batch(step, StateTables(self.plan, self.table, self.ring))

    def run(self, batch: StateBatch, first: int, seen: list[tuple[int, int]]) -> None:
        """Compute units in order over tokens `first` on; each token asks for the state right before it."""
        count, state, writes = int(batch.num_units), None, []
        read_before = dict(self.pool)
        for start, length, read, write in zip(*(array[:count] for array in batch[:4]), strict=True):
            number, position = self.seq_of_token[first + start], self.positions[first + start]
            state = state if read == CARRY else (number, 0) if read == NEW else read_before[read]
            assert state == (number, position), "it carries on from another state"
            for token in range(start, start + length):
                seen.append((int(number), int(self.positions[first + token])))
            state = (number, position + length)
            if write >= 0:
                self.pool[int(write)] = state
                writes.append(int(write))
        assert len(set(writes)) == len(writes), "two units leave their state in one block"

    def check(self, seen: list[tuple[int, int]]) -> None:
        assert seen == list(zip(self.seq_of_token.tolist(), self.positions.tolist(), strict=True)), "each token once"
        for block, state in self.expected.items():
            assert self.pool[block] == state


chunks = st.lists(
    st.tuples(
        st.integers(0, 300),
        st.one_of(st.just(1), st.integers(2, 9), st.integers(1, 200)),
        st.sets(st.integers(1, 30), max_size=2).map(lambda ends: tuple(sorted(16 * end for end in ends))),
    ),
    min_size=1,
    max_size=5,
)
intervals = st.sampled_from([16, 48, 64, 128, 512])
slots = st.sampled_from([0, 0, 1, 4, 9])


@settings(deadline=None, max_examples=examples(150))
@given(intervals, chunks, st.integers(0, 9), slots, st.integers(1, 4))
def test_units_leave_what_tokens_one_by_one_would(interval, chunks, padding, slots, apart):
    case, seen = Case(interval, chunks, padding, slots, apart), []
    batch = case.batch()
    case.run(batch, 0, seen)
    case.check(seen)
    count, decodes = int(batch.num_units), int(batch.num_decodes)
    assert (batch.length[:count] <= UNIT).all() and (batch.write[count:] == -1).all()
    assert decodes == (case.lengths == 1).sum()
    assert (batch.start[:decodes] == np.arange(decodes)).all() and (batch.read[:decodes] != CARRY).all()


@settings(deadline=None, max_examples=examples(150))
@given(intervals, chunks, slots, st.integers(1, 4))
def test_launches_of_single_tokens_leave_the_same(interval, chunks, slots, apart):
    """Each launch begins with what the one before left in blocks, as nothing else is carried over."""
    case, seen = Case(interval, chunks, slots=slots, intervals=apart), []
    whole = case.batch()
    for start in range(0, len(case.positions), ROWS):
        launch = token_by_token(whole, slice(start, start + ROWS)).units
        count = int(launch.num_units)
        assert (launch.length[:count] == 1).all() and int(launch.num_decodes) == 0
        assert len(launch.start) == ROWS
        case.run(launch, start, seen)
    case.check(seen)


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 40))
def test_a_sequence_is_cut_alike_whatever_else_is_in_the_batch_and_wherever_its_chunks_end(start, length, others):
    def borders(*parts: tuple[int, int]) -> set[int]:
        found = set()
        for at, tokens in parts:
            case = Case(128, [(at, tokens, ()), *((5, 30, ()) for _ in range(others % 3))])
            units = case.batch()
            number = int(np.flatnonzero((case.starts == at) & (case.lengths == tokens))[0])
            mine = case.seq_of_token[units.start[: int(units.num_units)]] == number
            found |= set(case.positions[units.start[: len(mine)][mine]].tolist())
        return found

    half = length // 2
    whole = borders((start, length))
    assert not half or borders((start, half), (start + half, length - half)) == whole | {start + half}


def test_a_state_without_a_block_is_refused():
    case = Case(64, [(20, 5, ())])
    case.table[:] = -1
    with pytest.raises(RuntimeError, match="a state of group state has no block"):
        case.batch()


def test_the_state_that_a_chunk_ends_in_may_lie_at_the_end_of_the_prompt():
    """A request that leaves no states for later ones has one for all of its prompt, however far that is."""
    case = Case(SIZE, [(0, 5, ())])
    case.table[0] = [-1, 7]
    assert case.batch().write[0] == 7

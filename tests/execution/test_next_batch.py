"""The arrays of decodes that follow others are those that they would have by themselves."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jpaged.execution import Bucket
from jpaged.execution.batch import BatchBuilder
from jpaged.execution.caches.base import BlockSettings
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.caches.registry import layer_caches
from jpaged.execution.packing import Packed, opened, packed
from jpaged.memory import MemoryManager
from jpaged.model_api import AttentionGroup, LatentGroup, LayerGroup
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Chunk, Request, ScheduledStep, Scheduler, Sequence
from jpaged.scheduling.step import Decodes

SEQS, LENGTH = 5, 40
GROUPS = [AttentionGroup("full", (0,), 1, 64), AttentionGroup("window", (1,), 1, 64, sliding_window=6)]
MORE = [AttentionGroup("chunks", (2,), 1, 64, chunk_size=8), LatentGroup("latents", (3,), 96, 32)]


def spec_of(groups: list[LayerGroup], size: int = 1 << 18) -> PoolSpec:
    return PoolSpec.plan(layer_caches(groups, BlockSettings(4, np.dtype("float32"), 1)), size)


SPEC, SMALL = spec_of(GROUPS), spec_of([*GROUPS, *MORE], 13 << 13)


def request(number: int, prompt: int, output: int, width: int = 1) -> Request:
    tokens = [(7 * number + i) % 11 for i in range(prompt)]
    params = SamplingParams(max_tokens=output, ignore_eos=True, n=width, temperature=1.0)
    seqs = [Sequence(2 * number + index, index, [*tokens], prompt) for index in range(width)]
    return Request(number, tokens, params, 0, prompt + output, frozenset(), frozenset(), seqs)


def make_builder(spec: PoolSpec = SPEC) -> BatchBuilder:
    return BatchBuilder(spec, max_num_seqs=SEQS, max_model_len=LENGTH)


numbers = st.tuples(st.integers(0, 12), st.integers(1, 12), st.integers(1, 24), st.sampled_from([1, 1, 1, 2]))
some_steps = st.lists(st.integers(0, 30), max_size=2)


@settings(max_examples=20, deadline=None)
@given(
    arrivals=st.lists(numbers, min_size=1, max_size=7),
    drained=some_steps,
    failed=some_steps,
    aborted=some_steps,
    mode=st.sampled_from(["recompute", "swap"]),
)
@example([(0, 12, 24, 1)] * 5, [], [17], [11], "swap")
@example([(0, 12, 24, 1)] * 5, [], [], [], "recompute")
def test_batches_that_follow_are_those_made_anew(arrivals, drained, failed, aborted, mode):
    """The pool is too small for all: sequences are preempted, and come back to other rows and blocks."""
    memory = MemoryManager(SMALL.layout, prefix_caching=True, max_step_tokens=8, swap_space_bytes=1 << 16)
    scheduler = Scheduler(memory, max_num_seqs=SEQS, max_num_batched_tokens=8, preemption_mode=mode)
    following, anew, todo, before = make_builder(SMALL), make_builder(SMALL), sorted(arrivals), None
    for now in range(2000):
        if not (todo or scheduler.has_work):
            break
        while todo and todo[0][0] <= now:
            scheduler.add(request(len(arrivals) - len(todo), *todo.pop(0)[1:]))
        if now in aborted and scheduler.requests:
            scheduler.abort(scheduler.requests[0])
        if now in failed:
            scheduler.restart()
            before = None
        step = scheduler.schedule()
        bucket = Bucket(SEQS, SEQS, True) if step.num_tokens == step.num_chunks else Bucket(8, SEQS, False)
        found, wanted = following.build(step, bucket), anew.build(ScheduledStep(step.chunks, step.samples), bucket)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert mine.dtype == other.dtype and np.array_equal(mine, other)
        scheduler.dispatched(step)
        for each in (before, step) if now in drained else (before,):
            if each is not None:
                scheduler.update(each, [3] * each.num_samples, [0.0] * each.num_samples)
        before = None if now in drained else step
    assert not scheduler.has_work


def decode_step(seqs: list[Sequence], start: int, tables: dict[int, list[list[int]]]) -> ScheduledStep:
    starts, sources = np.full(len(seqs), start, np.int32), np.arange(len(seqs), dtype=np.int32)
    requests = [request(seq.seq_id, 1, 9) for seq in seqs]
    return ScheduledStep(decodes=Decodes(requests, seqs, starts, sources, tables, []))


def test_decodes_that_follow_are_packed_and_leave_the_arrays_before_as_they_were():
    builder, bucket = make_builder(), Bucket(2, 2, True)
    seqs = [Sequence(row, 0, [1] * 4, 1, row=row) for row in range(2)]
    first = builder.laid_out(decode_step(seqs, 4, {0: [[1, 2], [1, 2]], 1: [[3, 4], [3, 4]]}), bucket)
    kept = first.words.copy()
    second = builder.laid_out(decode_step(seqs, 5, {}), bucket)
    assert isinstance(second, Packed) and second.form is first.form
    assert np.array_equal(first.words, kept)
    assert opened(second).positions.tolist() == [5, 5] and opened(second).kv_lens.tolist() == [6, 6]
    assert opened(second).caches[0].slots.tolist() == [9, 17]
    with pytest.raises(RuntimeError, match="no block"):
        for start in (6, 7, 8):
            builder.laid_out(decode_step(seqs, start, {}), bucket)


def test_what_is_packed_opens_to_the_arrays_that_it_was_made_of():
    tree = {"bits": np.array([True, False, True]), "words": np.arange(6, dtype=np.int32).reshape(2, 3)}
    tree["halves"] = np.arange(3, dtype=np.float16)
    for name, array in opened(packed(tree)).items():
        assert array.dtype == tree[name].dtype and np.array_equal(array, tree[name]), name


def test_a_step_of_a_chunk_breaks_the_row():
    builder, bucket = make_builder(), Bucket(2, 2, True)
    seqs = [Sequence(row, 0, [1] * 9, 1, row=row) for row in range(2)]
    builder.build(decode_step(seqs, 4, {0: [[1, 2], [1, 2]], 1: [[3, 4], [3, 4]]}), bucket)
    builder.build(ScheduledStep([Chunk(seqs[0], 0, 8, -1, [[5, 6], [5, 6]])]), Bucket(8, SEQS, False))
    assert builder.build(decode_step(seqs, 5, {}), bucket).caches[0].slots.tolist() == [25, 17]

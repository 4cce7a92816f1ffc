"""Steps cut into launches of one shape."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jpaged.execution import plan_pool
from jpaged.execution.batch import BatchBuilder
from jpaged.execution.deterministic import BUCKET, ROWS, launches, padded_bucket
from jpaged.model_api import AttentionGroup
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Chunk, Request, Sample, ScheduledStep, Sequence

SIZE = 4


def step_of(*chunks: tuple[int, int]) -> ScheduledStep:
    """Sequences with chunks [start, start + length); number s holds blocks 100 s, 100 s + 1, ... Each is sampled."""
    made, samples = [], []
    for number, (start, length) in enumerate(chunks):
        end = start + length
        seq = Sequence(number, 0, list(range(1000 * number, 1000 * number + end)), end, row=number)
        request = Request(number, seq.token_ids, SamplingParams(), 0, 999, frozenset(), frozenset(), [seq])
        blocks = [100 * number + i for i in range(-(-end // SIZE))]
        made.append(Chunk(seq, start, length, -1, [blocks]))
        samples.append(Sample(request, seq, made[-1]))
    return ScheduledStep(made, samples)


def cut(step: ScheduledStep):
    group, block_bytes = AttentionGroup("full", (0,), 1, 64), SIZE * 128 * 4
    spec = plan_pool([group], block_size=SIZE, dtype=jnp.dtype("float32"), shards=1, pool_bytes=400 * block_bytes)
    builder = BatchBuilder(spec, max_num_seqs=4, max_model_len=400)
    batch = builder.build(step, padded_bucket(step.num_tokens, 4))
    return [(launch.batch, launch.here) for launch in launches(batch, len(step.samples), spec.caches)]


def test_every_token_is_a_decode_of_its_own_sequence():
    (first, sampled), (second, also_sampled) = cut(step_of((7, 1), (0, 100)))
    for launch in (first, second):
        assert len(launch.tokens) == len(launch.kv_lens) == ROWS == BUCKET.tokens
    assert first.tokens.tolist() == [7, *range(1000, 1000 + ROWS - 1)]
    assert first.kv_lens.tolist() == [8, *range(1, ROWS)]
    assert first.query_starts.tolist() == list(range(ROWS + 1))
    (table, *_), (_, slots, *_) = first.caches[0], second.caches[0]
    assert table[0, :2].tolist() == [0, 1] and (table[1:, :2] == [100, 101]).all()
    rest = 101 - ROWS
    assert second.tokens[:rest].tolist() == list(range(1000 + ROWS - 1, 1100))
    assert second.kv_lens.tolist() == [*range(ROWS, 101), *[0] * (ROWS - rest)]
    assert second.query_starts.tolist() == [*range(rest + 1), *[rest] * (ROWS - rest)]
    assert (slots[rest:] == 400 * SIZE).all()
    assert sampled.tolist() == [True, False, False, False] and also_sampled.tolist() == [False, True, False, False]
    assert first.sample_at[0] == 0 and second.sample_at[1] == rest - 1


def test_a_full_launch_is_not_followed_by_an_empty_one():
    made = cut(step_of((0, ROWS)))
    assert len(made) == 1
    np.testing.assert_array_equal(made[0][0].positions, np.arange(ROWS))

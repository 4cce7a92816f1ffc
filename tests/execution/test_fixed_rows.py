"""Steps cut into launches of one shape."""

from __future__ import annotations

import numpy as np

from jpaged.execution.batch import BatchBuilder
from jpaged.execution.fixed_rows import BUCKET, ROWS, launches, padded_bucket
from jpaged.memory import FullAttention, GroupSpec, PoolLayout
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Chunk, Request, Sample, ScheduledStep, Sequence

SIZE = 4


def step_of(*chunks: tuple[int, int]) -> ScheduledStep:
    """Sequences with chunks [start, start + length); number s holds blocks 100 s, 100 s + 1, ... Each is sampled."""
    made, samples = [], []
    for number, (start, length) in enumerate(chunks):
        end = start + length
        seq = Sequence(number, 0, list(range(1000 * number, 1000 * number + end)), end, slot=number)
        request = Request(number, seq.token_ids, SamplingParams(), 0, 999, frozenset(), frozenset(), [seq])
        blocks = [100 * number + i for i in range(-(-end // SIZE))]
        made.append(Chunk(seq, start, length, -1, [blocks]))
        samples.append(Sample(request, seq, made[-1]))
    return ScheduledStep(made, samples)


def cut(step: ScheduledStep):
    spec = GroupSpec("full", layer_bytes=8, num_layers=1, block_size=SIZE, policy=FullAttention())
    builder = BatchBuilder(PoolLayout.plan([spec], 8 * 400), max_num_seqs=4, max_model_len=400)
    batch = builder.build(step, padded_bucket(step.num_tokens, 4))
    return list(launches(batch, len(step.samples)))


def test_every_token_is_a_decode_of_its_own_sequence():
    (first, sampled), (second, also_sampled) = cut(step_of((7, 1), (0, 100)))
    for launch in (first, second):
        assert len(launch.tokens) == len(launch.kv_lens) == ROWS == BUCKET.tokens
    assert first.tokens.tolist() == [7, *range(1000, 1000 + ROWS - 1)]
    assert first.kv_lens.tolist() == [8, *range(1, ROWS)]
    assert first.query_starts.tolist() == list(range(ROWS + 1))
    assert first.tables[0][0, :2].tolist() == [0, 1] and (first.tables[0][1:, :2] == [100, 101]).all()
    rest = 101 - ROWS
    assert second.tokens[:rest].tolist() == list(range(1000 + ROWS - 1, 1100))
    assert second.kv_lens.tolist() == [*range(ROWS, 101), *[0] * (ROWS - rest)]
    assert second.query_starts.tolist() == [*range(rest + 1), *[rest] * (ROWS - rest)]
    assert (second.slots[0][rest:] == 400 * SIZE).all()
    assert sampled.tolist() == [True, False, False, False] and also_sampled.tolist() == [False, True, False, False]
    assert first.sample_at[0] == 0 and second.sample_at[1] == rest - 1


def test_a_full_launch_is_not_followed_by_an_empty_one():
    made = cut(step_of((0, ROWS)))
    assert len(made) == 1
    np.testing.assert_array_equal(made[0][0].positions, np.arange(ROWS))

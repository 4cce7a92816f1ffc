"""The arrays of hand-made steps."""

from __future__ import annotations

import numpy as np
import pytest

from jpaged.execution import Bucket
from jpaged.execution.batch import EDITS_PER_SEQ, NO_TOKEN, BatchBuilder
from jpaged.memory import FullAttention, GroupSpec, PoolLayout, SlidingWindow
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Chunk, Request, Sample, ScheduledStep, Sequence

VOCAB = 50


def builder(max_num_seqs: int = 4) -> BatchBuilder:
    """Two groups, blocks of 4 and of 2 tokens; 12 and 12 blocks in the pool."""
    specs = [
        GroupSpec("full", layer_bytes=8, num_layers=1, block_size=4, policy=FullAttention()),
        GroupSpec("window", layer_bytes=8, num_layers=1, block_size=2, policy=SlidingWindow(4)),
    ]
    return BatchBuilder(PoolLayout.plan(specs, 8 * 12), max_num_seqs=max_num_seqs, max_model_len=16, vocab_size=VOCAB)


def sequence(tokens: list[int], slot: int, num_prompt: int | None = None) -> Sequence:
    return Sequence(slot + 100, 0, tokens, len(tokens) if num_prompt is None else num_prompt, slot=slot)


def request(seq: Sequence, *, seed: int = 0, eos: tuple[int, ...] = (), **params) -> Request:
    settings = SamplingParams(**params)
    stops = frozenset(eos) | frozenset(settings.stop_token_ids)
    return Request(0, seq.token_ids, settings, seed, 16, stops, frozenset(eos), [seq])


@pytest.fixture
def mixed():
    """A decode whose token is on the device, a decode the host knows, and a prefill chunk; padded to 10 tokens."""
    a, b, c = sequence([10, 11, 12], 2), sequence([20, 21], 0), sequence([30, 31, 32, 33, 34, 35, 36], 1)
    chunks = [
        Chunk(a, 3, 1, 5, [[7], [3, 4]]),
        Chunk(b, 1, 1, -1, [[1], [0]]),
        Chunk(c, 2, 5, -1, [[9, 2], [-1, 6, 5, 1]]),
    ]
    step = ScheduledStep(chunks, [Sample(request(c), c, chunks[2]), Sample(request(a), a, chunks[0])])
    return builder().build(step, Bucket(10, 4, False))


def test_tokens_are_the_hosts_or_rows_of_the_last_step(mixed):
    assert mixed.tokens.tolist() == [0, 21, 32, 33, 34, 35, 36, 0, 0, 0]
    assert mixed.source_rows.tolist() == [5] + [-1] * 9


def test_query_starts_positions_and_lengths(mixed):
    assert mixed.query_starts.tolist() == [0, 1, 2, 7, 7]
    assert mixed.positions.tolist() == [3, 1, 2, 3, 4, 5, 6, 0, 0, 0]
    assert mixed.kv_lens.tolist() == [4, 2, 7, 0]


def test_tables_and_write_slots_of_every_group(mixed):
    full, window = mixed.tables
    assert full.tolist() == [[7, -1, -1, -1], [1, -1, -1, -1], [9, 2, -1, -1], [-1] * 4]
    assert window[2].tolist() == [-1, 6, 5, 1, -1, -1, -1, -1]
    assert mixed.slots[0].tolist() == [31, 5, 38, 39, 8, 9, 10] + [48] * 3
    assert mixed.slots[1].tolist() == [9, 1, 12, 13, 10, 11, 2] + [24] * 3


def test_padding_is_out_of_range_so_that_it_is_written_nowhere(mixed):
    for slots, size in zip(mixed.slots, (4, 2), strict=True):
        assert (slots[7:] == 12 * size).all()


def test_samples_start_from_their_chunks_last_row_in_the_samples_order(mixed):
    assert mixed.sample_at.tolist() == [6, 0, 0, 0]
    assert mixed.sampling.position.tolist() == [7, 4, 0, 0]


def test_the_last_token_of_a_longer_chunk_can_be_on_the_device():
    a = sequence([10, 11, 12], 0)
    chunks = [Chunk(a, 1, 3, 2, [[0], [0, 1]])]
    batch = builder().build(ScheduledStep(chunks), Bucket(4, 4, False))
    assert batch.tokens.tolist() == [11, 12, 0, 0]
    assert batch.source_rows.tolist() == [-1, -1, 2, -1]


def test_tables_are_remembered_until_they_change():
    build, a = builder().build, sequence(list(range(10, 19)), 3)
    first = build(ScheduledStep([Chunk(a, 0, 4, -1, [[5, 6], [1, 2]])]), Bucket(4, 4, False))
    kept = build(ScheduledStep([Chunk(a, 3, 1, -1, None)]), Bucket(1, 1, True))
    assert kept.tables[0][0].tolist() == first.tables[0][0].tolist() == [5, 6, -1, -1]
    shorter = build(ScheduledStep([Chunk(a, 3, 1, -1, [[8], [-1, 3]])]), Bucket(1, 1, True))
    assert shorter.tables[0][0].tolist() == [8, -1, -1, -1]
    assert shorter.slots[0].tolist() == [35]


@pytest.mark.parametrize("tables", [[[12], [0]], [[0], [12]], [[-2], [0]], [[0], [-7]]])
def test_a_block_id_outside_the_pool_is_an_error(tables):
    step = ScheduledStep([Chunk(sequence([1], 0), 0, 1, -1, tables)])
    with pytest.raises(RuntimeError, match=r"sequence 100: block ids .* are outside \[0, 12\)"):
        builder().build(step, Bucket(1, 1, True))


@pytest.mark.parametrize("tables", [[[-1], [0]], [[0], []]])
def test_a_token_without_a_block_is_an_error(tables):
    step = ScheduledStep([Chunk(sequence([1], 0), 0, 1, -1, tables)])
    with pytest.raises(RuntimeError, match="has no block to be written to"):
        builder().build(step, Bucket(1, 1, True))


def sampling_of(*requests: Request, start: int = 0, width: int = 4):
    chunks = [Chunk(r.sequences[0], start, 1, -1, [[i], [i] * (start // 2 + 1)]) for i, r in enumerate(requests)]
    samples = [Sample(r, r.sequences[0], chunk) for r, chunk in zip(requests, chunks, strict=True)]
    return builder().build(ScheduledStep(chunks, samples), Bucket(width, width, True)).sampling


def test_sampling_settings_become_rows_and_padding_is_greedy():
    seed = (5 << 32) | 9
    args = sampling_of(
        request(sequence([1], 0), seed=seed, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1),
        request(sequence([1], 1), temperature=0.0, top_k=3),
        request(sequence([1], 2), temperature=2.0, top_k=10**6),
    )
    np.testing.assert_allclose(args.temperature, [0.5, 0.0, 2.0, 0.0])
    assert args.top_k.tolist() == [3, VOCAB, VOCAB, VOCAB]
    np.testing.assert_allclose(args.top_p, [0.9, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(args.min_p, [0.1, 0.0, 0.0, 0.0])
    assert args.seed[0].tolist() == [5, 9]
    assert (args.edit_row == NO_TOKEN).all()


def edits(args) -> set[tuple[int, int]]:
    pairs = zip(args.edit_row.tolist(), args.edit_token.tolist(), strict=True)
    return {pair for pair in pairs if pair[0] != NO_TOKEN}


def test_stop_tokens_are_banned_until_min_tokens_were_generated():
    def make(min_tokens):
        return request(sequence([1, 2, 3], 0, num_prompt=1), eos=(7,), stop_token_ids=[8, 9], min_tokens=min_tokens)

    # The token at position 3 is drawn: two were generated before it.
    assert edits(sampling_of(make(3), start=2)) == {(0, 7), (0, 8), (0, 9)}
    assert edits(sampling_of(make(2), start=2)) == set()


def test_more_bans_than_reserved_still_fit():
    many = list(range(10, 10 + 3 * EDITS_PER_SEQ))
    args = sampling_of(request(sequence([1], 0), stop_token_ids=many, min_tokens=5), width=1)
    assert edits(args) == {(0, token) for token in many}
    assert len(args.edit_row) == 16

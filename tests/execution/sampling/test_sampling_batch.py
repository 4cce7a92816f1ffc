"""Sampling settings as rows of arrays."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.execution.sampling.logit_edits import BANS, NO_ROW
from jpaged.execution.sampling.sampler import sample
from jpaged.execution.sampling.sampling_batch import all_plain, greedy_rows, of_one_shape, sampling_arrays
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Chunk, Request, Sample, Sequence

VOCAB = 50


def sequence(tokens: list[int], slot: int, num_prompt: int | None = None) -> Sequence:
    return Sequence(slot + 100, 0, tokens, len(tokens) if num_prompt is None else num_prompt, slot=slot)


def request(seq: Sequence, *, seed: int = 0, eos: tuple[int, ...] = (), **params) -> Request:
    settings = SamplingParams(**params)
    stops = frozenset(eos) | frozenset(settings.stop_token_ids)
    return Request(0, seq.token_ids, settings, seed, 16, stops, frozenset(eos), [seq])


def sampling_of(*requests: Request, start: int = 0, width: int = 4):
    chunks = [Chunk(r.sequences[0], start, 1, -1, None) for r in requests]
    samples = [Sample(r, r.sequences[0], chunk) for r, chunk in zip(requests, chunks, strict=True)]
    return sampling_arrays(samples, width, VOCAB)


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
    assert (args.edits.ban_row == NO_ROW).all() and (args.edits.token_row == NO_ROW).all()


def test_temperatures_that_float32_arithmetic_takes_for_0_draw_the_most_likely_token():
    logits = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32)
    tiny = [5e-324, 1e-46, 1e-40, 1e-38]
    args = sampling_of(*(request(sequence([1], i), temperature=t, top_p=1e-40) for i, t in enumerate(tiny)))
    drawn, _ = sample(jnp.asarray(logits), args, jnp.zeros(4, jnp.int32))
    assert drawn.tolist() == logits.argmax(1).tolist()


def test_every_output_has_a_random_stream_of_its_own_and_output_0_the_requests():
    seqs = [Sequence(i, i, [1], 1, slot=i) for i in range(3)]
    wide = Request(0, [1], SamplingParams(n=3), 2**63 - 1, 16, frozenset(), frozenset(), seqs)
    chunk = Chunk(seqs[0], 0, 1, -1, None)
    args = sampling_arrays([Sample(wide, seq, chunk) for seq in seqs], 3, VOCAB)
    assert args.seed[0].tolist() == [2**31 - 1, 2**32 - 1]
    words = [(high << 32) | low for high, low in args.seed.tolist()]
    assert words == [(2**63 - 1 + j * 0x9E3779B97F4A7C15) % 2**64 for j in range(3)]


def bans(args) -> set[tuple[int, int]]:
    pairs = zip(args.edits.ban_row.tolist(), args.edits.ban_id.tolist(), strict=True)
    return {pair for pair in pairs if pair[0] != NO_ROW}


def test_stop_tokens_are_banned_until_min_tokens_were_generated():
    def make(min_tokens):
        return request(sequence([1, 2, 3], 0, num_prompt=1), eos=(7,), stop_token_ids=[8, 9], min_tokens=min_tokens)

    # The token at position 3 is drawn: two were generated before it.
    assert bans(sampling_of(make(3), start=2)) == {(0, 7), (0, 8), (0, 9)}
    assert bans(sampling_of(make(2), start=2)) == set()


def test_more_bans_than_reserved_still_fit():
    many = list(range(10, 10 + BANS + 1))
    args = sampling_of(request(sequence([1], 0), stop_token_ids=many, min_tokens=5), width=1)
    assert bans(args) == {(0, token) for token in many}
    assert len(args.edits.ban_row) == 4 * BANS


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"min_tokens": 1}, False),
        ({"temperature": 1.0}, False),
        ({"logprobs": 0}, False),
        ({"presence_penalty": 0.1}, False),
    ],
    ids=str,
)
def test_a_batch_is_plain_when_it_is_greedy_and_nothing_is_banned_or_asked_for(params, plain):
    settings = {"temperature": 0.0, "stop_token_ids": [3]} | params
    args = sampling_of(request(sequence([1], 0), temperature=0.0), request(sequence([1, 2], 1, 1), **settings))
    assert all_plain(args) == plain
    assert all_plain(greedy_rows(3, VOCAB))


def test_arrays_of_several_replicas_are_padded_to_the_longest_with_pairs_that_count_for_no_row():
    long = sampling_of(request(sequence([1], 0), logit_bias=dict.fromkeys(range(40), 1.0)))
    wide = long._replace(edits=long.edits._replace(ban_row=np.zeros(BANS * 4, np.int32)))
    short = greedy_rows(4, VOCAB)
    first, second = of_one_shape([short, wide])
    assert first.edits.ban_row.shape == second.edits.ban_row.shape == (BANS * 4,)
    assert (first.edits.ban_row == NO_ROW).all() and (second.edits.ban_row == 0).all()
    assert of_one_shape([short])[0] is short

"""Draws against the exact distribution, and what a draw must not depend on."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from logit_edit_cases import args_of, arrays_of, expected_logits, request_of, with_arrays

from jpaged.execution.sampling.edit import NO_ROW
from jpaged.execution.sampling.logit_edits import BannedTokens, TokenMasks
from jpaged.execution.sampling.registry import EDITS
from jpaged.execution.sampling.sampler import SamplingArrays, _arrivals, most_likely, rank, sample
from jpaged.execution.sampling.sampling_batch import RANKED, blank_rows, top_size
from jpaged.execution.sampling.truncations import ALL, DrawnRows, LeastWeights, LikelyTokens, Nuclei

_sample = jax.jit(sample)


def sample_jit(logits, args):
    """Nothing is pending."""
    return _sample(logits, args, np.zeros(len(logits), np.int32))


DRAWS = 4096
VOCAB = 40


def settings(
    rows: int, vocab: int = VOCAB, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, position=7, banned=()
) -> SamplingArrays:
    """One row's settings on every row; `seed` (default: the row number) makes each draw its own."""
    args = blank_rows(rows, vocab)
    seeds = np.arange(rows) if seed is None else np.broadcast_to(seed, rows)
    return with_arrays(
        args._replace(position=np.broadcast_to(np.asarray(position, np.int32), rows).copy()),
        DrawnRows(
            temperature=np.full(rows, temperature, np.float32),
            seed=np.stack([np.zeros(rows), seeds], axis=1).astype(np.uint32),
        ),
        LikelyTokens(np.full(rows, top_k if top_k > 0 else ALL, np.int32)),
        Nuclei(np.full(rows, top_p, np.float32)),
        LeastWeights(np.full(rows, min_p, np.float32)),
        bans([(row, token) for row in range(rows) for token in banned], rows),
    )


def bans(pairs: list[tuple[int, int]], rows: int) -> BannedTokens:
    row, token = np.array(pairs or [(NO_ROW, NO_ROW)], np.int32).T
    return BannedTokens(row, token, np.full(len(row), -1, np.int32), np.full(rows, -1, np.int32))


def expected(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, banned=()) -> np.ndarray:
    """The distribution in float64, in vLLM's order: temperature, min_p, top-k, top-p. Ties are kept together."""
    scaled = np.array(logits, np.float64)
    scaled[list(banned)] = -np.inf
    scaled = (scaled - scaled.max()) / temperature
    p = np.exp(scaled)
    p[p < min_p] = 0
    if top_k > 0:
        p[p < np.sort(p)[::-1][min(top_k, len(p)) - 1]] = 0
    if top_p < 1:
        p /= p.sum()
        ordered = np.sort(p)[::-1]
        p[p < ordered[np.argmax(np.cumsum(ordered) >= top_p)]] = 0
    return p / p.sum()


def chi_square_limit(freedom: int) -> float:
    """The value a chi-square variable passes once in a million times (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.76 * np.sqrt(2 / (9 * freedom))) ** 3


def logits_of(seed: int, vocab: int = VOCAB, spread: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


COMBINATIONS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": VOCAB + 9},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.7, "min_p": 0.05, "top_k": 9},
    {"temperature": 1.3, "min_p": 0.02, "top_p": 0.9},
    {"temperature": 1.9, "min_p": 0.02, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.2, "top_p": 0.9, "banned": (3, 17, 25)},
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_draws_follow_the_exact_distribution(options):
    logits = logits_of(3)
    want = expected(logits, **options)
    tokens, _ = sample_jit(jnp.tile(logits, (DRAWS, 1)), settings(DRAWS, **options))
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    assert not counts[want == 0].any(), "a token outside the kept set was drawn"
    often = want * DRAWS >= 5
    observed = np.append(counts[often], counts[~often].sum())
    predicted = np.append(want[often], want[~often].sum()) * DRAWS
    observed, predicted = observed[predicted > 0], predicted[predicted > 0]
    if len(predicted) == 1:
        return
    chi_square = ((observed - predicted) ** 2 / predicted).sum()
    assert chi_square < chi_square_limit(len(predicted) - 1)


def test_draws_along_one_sequence_follow_the_distribution_too():
    logits = logits_of(4)
    tokens, _ = sample_jit(jnp.tile(logits, (DRAWS, 1)), settings(DRAWS, seed=11, position=np.arange(DRAWS)))
    want = expected(logits) * DRAWS
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    often = want >= 5
    assert ((counts - want)[often] ** 2 / want[often]).sum() < chi_square_limit(often.sum())


INF = float("inf")


def test_only_kept_tokens_are_drawn_from_a_large_vocabulary():
    vocab = 5003
    logits = logits_of(8, vocab)
    tokens, _ = sample_jit(jnp.tile(logits, (256, 1)), settings(256, vocab, top_k=50, temperature=5.0))
    assert set(np.asarray(tokens).tolist()) <= set(np.argsort(-logits)[:50].tolist())
    assert len(set(np.asarray(tokens).tolist())) > 30


def test_greedy_takes_the_first_of_equal_maxima():
    logits = jnp.array([[1.0, 5.0, 5.0, 0.0], [7.0, 7.0, 7.0, 7.0], [-INF, -INF, -2.0, -2.0], [0.0, 1.0, 2.0, 3.0]])
    tokens, _ = sample_jit(logits, blank_rows(4, 4))
    assert tokens.tolist() == [1, 0, 2, 3]


def test_greedy_rows_stay_greedy_beside_random_ones():
    logits = jnp.tile(logits_of(5), (8, 1))
    args = settings(8, temperature=3.0)
    arrays_of(args, DrawnRows).temperature[::2] = 0
    tokens, _ = sample_jit(logits, args)
    assert set(np.asarray(tokens)[::2].tolist()) == {int(logits[0].argmax())}


def test_a_draw_depends_on_no_neighbour_and_no_batch_size():
    mixed = list(itertools.product((0.0, 0.8, 2.0), (0, 7), (1.0, 0.6), (0.0, 0.05)))
    rows = len(mixed)
    logits = np.stack([logits_of(i) for i in range(rows)])
    args = settings(rows, seed=np.arange(rows) * 7, position=np.arange(rows) + 3)
    for row, (temperature, top_k, top_p, min_p) in enumerate(mixed):
        arrays_of(args, DrawnRows).temperature[row] = temperature
        arrays_of(args, Nuclei).top_p[row] = top_p
        arrays_of(args, LeastWeights).min_p[row] = min_p
        arrays_of(args, LikelyTokens).top_k[row] = top_k or VOCAB
    together, logprobs = sample_jit(logits, args)
    order = np.random.default_rng(0).permutation(rows)
    shuffled, _ = sample_jit(logits[order], _rows(args, order))
    assert np.asarray(shuffled).tolist() == np.asarray(together)[order].tolist()
    for row in range(rows):
        token, logprob = sample_jit(logits[row : row + 1], _rows(args, [row]))
        assert int(token[0]) == int(together[row])
        assert float(logprob[0]) == pytest.approx(float(logprobs[row]), abs=1e-6)


def _rows(args: SamplingArrays, rows) -> SamplingArrays:
    """The same settings in other rows; no row is edited."""

    def taken(edit, arrays, blank):
        return blank if edit.pairs or edit.arrays is TokenMasks else edit.arrays(*(array[rows] for array in arrays))

    blank = blank_rows(len(rows), VOCAB)
    edits = tuple(map(taken, EDITS, args.edits, blank.edits))
    return SamplingArrays(args.position[rows], args.ranked[rows], edits)


def test_seed_and_position_choose_the_draw():
    logits = jnp.tile(jnp.zeros(VOCAB), (64, 1))
    by_seed, _ = sample_jit(logits, settings(64, seed=np.arange(64), position=1))
    by_position, _ = sample_jit(logits, settings(64, seed=1, position=np.arange(64)))
    again, _ = sample_jit(logits, settings(64, seed=np.arange(64), position=1))
    assert by_seed.tolist() == again.tolist()
    assert len(set(by_seed.tolist())) > 20 and len(set(by_position.tolist())) > 20
    high = settings(64, seed=1, position=1)
    arrays_of(high, DrawnRows).seed[:, 0] = np.arange(64)  # the upper half of a 64-bit seed counts too
    assert len(set(sample_jit(logits, high)[0].tolist())) > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_those_of_torch(temperature):
    logits = np.stack([logits_of(i, 1000, spread=6.0) for i in range(32)])
    tokens, logprobs = sample_jit(logits, settings(32, 1000, temperature=temperature, top_p=0.9, banned=(3,)))
    want = torch.log_softmax(torch.from_numpy(logits), dim=1)[torch.arange(32), torch.tensor(np.asarray(tokens))]
    np.testing.assert_allclose(np.asarray(logprobs), want.numpy(), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 1e6])
def test_banned_tokens_are_never_drawn(temperature):
    logits = logits_of(6)
    banned = tuple(np.argsort(-logits)[:5].tolist())
    tokens, _ = sample_jit(jnp.tile(logits, (512, 1)), settings(512, temperature=temperature, banned=banned))
    assert not set(np.asarray(tokens).tolist()) & set(banned)
    if temperature in (0.0, 1e-5):
        assert set(np.asarray(tokens).tolist()) == {int(np.argsort(-logits)[5])}


def test_a_ban_touches_its_own_row_only():
    logits = jnp.tile(logits_of(6), (4, 1))
    args = blank_rows(4, VOCAB)
    best = int(logits[0].argmax())
    args = with_arrays(args, bans([(2, best), (2, (best + 1) % VOCAB)], 4))
    tokens, _ = sample_jit(logits, args)
    assert [int(token) == best for token in tokens] == [True, True, False, True]


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-38, 1e-20, 1e-6, 1e6, 1e20, 3e38])
def test_extreme_temperatures_stay_finite_and_in_the_vocabulary(temperature):
    logits = logits_of(7)
    tokens, logprobs = sample_jit(jnp.tile(logits, (256, 1)), settings(256, temperature=temperature))
    tokens = np.asarray(tokens)
    assert np.isfinite(np.asarray(logprobs)).all()
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    if temperature <= 1e-6:
        assert (tokens == logits.argmax()).all()
    if temperature >= 1e6:
        assert len(set(tokens.tolist())) == VOCAB


@pytest.mark.parametrize("vocab", [1, 7, 129, 20000])
def test_no_draw_lands_on_a_token_of_weight_zero(vocab):
    """Also where few tokens of many can be drawn, and where weights are as small as float32 goes."""
    rng = np.random.default_rng(vocab)
    rows = 256
    weights = rng.exponential(size=(rows, vocab)) * rng.choice([1.0, 1e-20, 1e-38], size=(rows, 1))
    weights *= rng.random((rows, vocab)) < rng.choice([0.0, 2e-3, 0.5], size=(rows, 1))
    weights[np.arange(rows), rng.integers(0, vocab, rows)] = 1.0
    weights = weights.astype(np.float32)
    seeds = np.stack([np.zeros(rows), np.arange(rows)], axis=1).astype(np.uint32)
    for position in range(4):
        times = np.asarray(jax.jit(_arrivals)(weights, seeds, np.full(rows, position, np.int32)))
        tokens = times.argmin(axis=1)
        assert (weights[np.arange(rows), tokens] > 0).all()
        assert np.isfinite(times.min(axis=1)).all()


def test_rounding_of_the_logits_hardly_ever_changes_a_draw():
    """The vocabulary is large and flat: borders of a cumulative sum lie as close as its rounding errors."""
    rng = np.random.default_rng(2)
    rows, vocab = 128, 49152
    logits = rng.normal(0, 1.5, (rows, vocab)).astype(np.float32)
    rounded = logits + rng.normal(0, 3e-6, (rows, vocab)).astype(np.float32)
    drawn, _ = sample_jit(jnp.asarray(logits), settings(rows, vocab))
    again, _ = sample_jit(jnp.asarray(rounded), settings(rows, vocab))
    assert drawn.tolist() == again.tolist()
    assert len(set(drawn.tolist())) > rows // 2


def test_a_padded_vocabulary_draws_the_same_tokens():
    """Tensor parallelism pads the vocabulary with tokens that cannot be drawn."""
    logits = np.random.default_rng(4).normal(0, 1, (64, 1000)).astype(np.float32)
    padded = np.pad(logits, ((0, 0), (0, 24)), constant_values=-np.inf)
    drawn, _ = sample_jit(jnp.asarray(logits), settings(64, 1000))
    also, _ = sample_jit(jnp.asarray(padded), settings(64, 1024))
    assert drawn.tolist() == also.tolist()


def test_the_most_likely_tokens_are_what_greedy_rows_draw():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(5, VOCAB)), jnp.float32).at[2, 7].set(9).at[2, 31].set(9)
    tokens, logprobs = most_likely(logits)
    drawn, drawn_logprobs = sample_jit(logits, blank_rows(5, VOCAB))
    assert tokens.tolist() == drawn.tolist() == np.argmax(logits, axis=1).tolist()
    np.testing.assert_allclose(logprobs, drawn_logprobs, atol=1e-6)
    np.testing.assert_allclose(
        logprobs, torch.log_softmax(torch.tensor(np.asarray(logits)), 1).max(1).values, atol=1e-5
    )


EDITED = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -1.1, "presence_penalty": 0.4},
    {"repetition_penalty": 1.7},
    {"logit_bias": {3: 2.5, 9: -1.5, 30: -100.0}},
    {"allowed": [2, 3, 9, 17, 39]},
    {"bad_words": [[9], [3, 17], [9, 9, 4]]},
    {"min_tokens": 9, "stop_ids": [9, 30]},
    {"repetition_penalty": 0.8, "presence_penalty": 1.0, "logit_bias": {3: 3.0}, "bad_words": [[5]]},
]


def _repeated(edit, arrays):
    """The arrays of one row, for `DRAWS` rows."""
    row_of_pair = arrays._asdict().get("row")
    repeated = {}
    for name, array in arrays._asdict().items():
        if name not in edit.pairs:
            repeated[name] = np.repeat(array, DRAWS, axis=0)
        elif name == "row":
            repeated[name] = np.repeat(np.arange(DRAWS, dtype=np.int32), (array == 0).sum())
        else:
            repeated[name] = np.tile(array[row_of_pair == 0], DRAWS)
    return edit.arrays(**repeated)


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("options", EDITED, ids=str)
def test_draws_follow_the_exact_distribution_of_edited_logits(options, pending):
    logits = logits_of(3)
    request = request_of([5, 9, 20], [9, 30, 9, 3], **options)
    want = expected(expected_logits(logits, request))
    one, last_tokens = args_of([request], pending=pending)
    drawn_rows = arrays_of(settings(DRAWS), DrawnRows)
    args = with_arrays(blank_rows(DRAWS, VOCAB), *map(_repeated, EDITS, one.edits))
    args = with_arrays(args._replace(position=np.full(DRAWS, 7, np.int32)), drawn_rows)
    drawn, logprobs = _sample(np.tile(logits, (DRAWS, 1)), args, last_tokens)
    drawn = np.asarray(drawn)
    counts = np.bincount(drawn, minlength=VOCAB)
    assert not counts[want == 0].any()
    often = want * DRAWS >= 5
    chi_square = ((counts - want * DRAWS)[often] ** 2 / (want * DRAWS)[often]).sum()
    assert chi_square < chi_square_limit(often.sum() - 1)
    raw = torch.log_softmax(torch.from_numpy(logits), 0)[torch.tensor(drawn).long()]
    np.testing.assert_allclose(np.asarray(logprobs), raw.numpy(), atol=1e-4)


# Ranks and most likely tokens against a sort.

ranking = jax.jit(rank, static_argnums=(2, 3))


@pytest.mark.parametrize("top", [1, 8, 32])
def test_the_most_likely_tokens_are_those_of_a_sort_and_their_logprobs_those_of_torch(top):
    logits = np.random.default_rng(top).normal(0, 5, (6, 1000)).astype(np.float32)
    tokens = np.random.default_rng(1).integers(0, 1000, 6)
    ranks, ids, logprobs = ranking(logits, tokens, top, True)
    order = np.argsort(-logits, axis=1, kind="stable")
    assert ids.tolist() == order[:, :top].tolist()
    assert ranks.tolist() == [order[row].tolist().index(token) + 1 for row, token in enumerate(tokens)]
    want = torch.log_softmax(torch.from_numpy(logits), 1).gather(1, torch.tensor(np.asarray(ids), dtype=torch.int64))
    np.testing.assert_allclose(logprobs, want.numpy(), atol=1e-4)


def test_equal_tokens_come_by_id_and_share_the_place_of_the_first():
    ranks, ids, _ = ranking(jnp.array([[1.0, 3.0, 3.0, 5.0]]), jnp.array([2]), 3, True)
    assert ranks.tolist() == [2] and ids.tolist() == [[3, 1, 2]]


def test_no_more_tokens_come_back_than_the_vocabulary_has():
    _, ids, _ = ranking(jnp.array([[1.0, 3.0, 2.0]]), jnp.array([0]), 8, True)
    assert ids.tolist() == [[1, 2, 0]]


def test_few_sizes_serve_every_number_of_tokens():
    assert [top_size(n) for n in (0, 1, RANKED, RANKED + 1, 16, 17, 20)] == [8, 8, 8, 16, 16, 32, 32]

"""Sampling settings as rows of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_edit_cases import arrays_of, with_arrays
from thorough import examples

from jpaged.execution.mesh import make_mesh
from jpaged.execution.sampling.edit import NO_ROW, PIECE
from jpaged.execution.sampling.logit_edits import BannedTokens, Bans, TokenMasks, WeighedTokens
from jpaged.execution.sampling.pair_tables import PairTables
from jpaged.execution.sampling.registry import EDITS
from jpaged.execution.sampling.sampler import sample
from jpaged.execution.sampling.sampling_batch import (
    PlacedRows,
    SamplerRows,
    blank_rows,
    of_all,
    sampling_arrays,
    with_room,
)
from jpaged.execution.sampling.truncations import ALL, DrawnRows, LeastWeights, LikelyTokens, Nuclei
from jpaged.sampling_params import SamplingParams, StructuredOutputsParams, parameters_of
from jpaged.scheduling import Chunk, Request, Sample, ScheduledStep, Sequence

VOCAB = 50


def sequence(tokens: list[int], row: int, num_prompt: int | None = None) -> Sequence:
    return Sequence(row + 100, 0, tokens, len(tokens) if num_prompt is None else num_prompt, row=row)


def request(seq: Sequence, *, seed: int = 0, eos: tuple[int, ...] = (), **params) -> Request:
    settings = SamplingParams(**params)
    stops = frozenset(eos) | frozenset(settings.stop_token_ids)
    return Request(0, seq.token_ids, settings, seed, 16, stops, frozenset(eos), [seq])


def sampling_of(*requests: Request, start: int = 0, width: int = 4):
    chunks = [Chunk(r.sequences[0], start, 1, -1, None) for r in requests]
    samples = [Sample(r, r.sequences[0], chunk) for r, chunk in zip(requests, chunks, strict=True)]
    return sampling_arrays(samples, width, VOCAB)


def test_pairs_that_no_list_of_few_rows_holds_are_drawn_in_more_rows_and_at_last_in_tables():
    def drawn(pairs: int) -> tuple[int, bool]:
        of_all = request(sequence([1], 0), bad_words=None)
        of_all.bad_words = tuple((number % VOCAB,) for number in range(pairs))
        args = with_room((1, 4, 8, 16), lambda width: sampling_of(of_all, width=width))
        return args.position.shape[0], args.tabled

    few, many = Bans().listed(1), Bans().listed(16)
    assert drawn(few) == (1, False) and drawn(few + 1) == (4, False)
    assert drawn(many) == (8, False) and drawn(many + 1) == (16, True)


def test_sampling_settings_become_rows_and_padding_is_greedy():
    seed = (5 << 32) | 9
    args = sampling_of(
        request(sequence([1], 0), seed=seed, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1),
        request(sequence([1], 1), temperature=0.0, top_k=3),
        request(sequence([1], 2), temperature=2.0, top_k=10**6),
    )
    drawn = arrays_of(args, DrawnRows)
    np.testing.assert_allclose(drawn.temperature, [0.5, 0.0, 2.0, 0.0])
    assert drawn.seed[0].tolist() == [5, 9]
    assert arrays_of(args, LikelyTokens).top_k.tolist() == [3, ALL, 10**6, ALL]
    np.testing.assert_allclose(arrays_of(args, Nuclei).top_p, [0.9, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(arrays_of(args, LeastWeights).min_p, [0.1, 0.0, 0.0, 0.0])
    assert arrays_of(args, BannedTokens) is arrays_of(args, WeighedTokens) is arrays_of(args, TokenMasks) is None


def test_temperatures_that_float32_arithmetic_takes_for_0_draw_the_most_likely_token():
    logits = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32)
    tiny = [5e-324, 1e-46, 1e-40, 1e-38]
    args = sampling_of(*(request(sequence([1], i), temperature=t, top_p=1e-40) for i, t in enumerate(tiny)))
    args = with_arrays(blank_rows(4, VOCAB), *args.edits)
    drawn, _ = sample(jnp.asarray(logits), args, jnp.zeros(4, jnp.int32))
    assert drawn.tolist() == logits.argmax(1).tolist()


def test_every_output_has_a_random_stream_of_its_own_and_output_0_the_requests():
    seqs = [Sequence(i, i, [1], 1, row=i) for i in range(3)]
    wide = Request(0, [1], SamplingParams(n=3), 2**63 - 1, 16, frozenset(), frozenset(), seqs)
    chunk = Chunk(seqs[0], 0, 1, -1, None)
    args = sampling_arrays([Sample(wide, seq, chunk) for seq in seqs], 3, VOCAB)
    seeds = arrays_of(args, DrawnRows).seed.tolist()
    assert seeds[0] == [2**31 - 1, 2**32 - 1]
    words = [(high << 32) | low for high, low in seeds]
    assert words == [(2**63 - 1 + j * 0x9E3779B97F4A7C15) % 2**64 for j in range(3)]


def bans(args) -> set[tuple[int, int]]:
    banned = arrays_of(args, BannedTokens)
    pairs = [] if banned is None else zip(banned.row.tolist(), banned.token.tolist(), strict=True)
    return {pair for pair in pairs if pair[0] != NO_ROW}


def test_stop_tokens_are_banned_until_min_tokens_were_generated():
    def make(min_tokens):
        return request(sequence([1, 2, 3], 0, num_prompt=1), eos=(7,), stop_token_ids=[8, 9], min_tokens=min_tokens)

    # The token at position 3 is drawn: two were generated before it.
    assert bans(sampling_of(make(3), start=2)) == {(0, 7), (0, 8), (0, 9)}
    assert bans(sampling_of(make(2), start=2)) == set()


def test_more_bans_than_reserved_still_fit():
    many = list(range(10, 10 + Bans().listed(1) + 1))
    args = sampling_of(request(sequence([1], 0), stop_token_ids=many, min_tokens=5), width=1)
    assert bans(args) == {(0, token) for token in many}
    assert len(arrays_of(args, BannedTokens).row) == PIECE
    assert args.tabled


ASKING = {
    "temperature": {"temperature": 0.5},
    "top_k": {"temperature": 0.5, "top_k": 3},
    "top_p": {"temperature": 0.5, "top_p": 0.5},
    "min_p": {"temperature": 0.5, "min_p": 0.5},
    "presence_penalty": {"presence_penalty": 0.1},
    "frequency_penalty": {"frequency_penalty": -0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {3: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": [3, 4]},
    "bad_words": {"bad_words": ["four"]},
    "min_tokens": {"min_tokens": 2},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(choice=["four"])},
    "thinking_token_budget": {"thinking_token_budget": 0},
    "reasoning_end_str": {"thinking_token_budget": 0, "reasoning_end_str": "now"},
    "reasoning_parser": {"thinking_token_budget": 0, "reasoning_parser": "think"},
    "tool_parser": {"thinking_token_budget": 0, "tool_parser": "none"},
}
"""Parameters that a row has where it asks for an edit by this one."""


class OnlyFour:
    """A grammar, or a thought that is to be closed by this token."""

    mask = np.array([16, 0], np.int32)


def asking(**params) -> Request:
    """A greedy request with what its prompt's processing adds; its next token is drawn after one that it generated."""
    made = request(sequence([1, 2], 0, 1), **{"temperature": 0.0, "stop_token_ids": [3], **params})
    if made.params.bad_words:
        made.bad_words = ((2, 4),)
    if made.params.allowed_token_ids:
        made.allowed_mask = np.array([24, 0], np.int32)
    if made.has_rules:
        made.sequences[0].grammar = OnlyFour()
    return made


def test_each_parameter_that_edits_is_tried_here():
    assert ASKING.keys() == {name for name, each in parameters_of(SamplingParams).items() if each.part == "edit"}


@pytest.mark.parametrize("field", sorted(ASKING))
def test_a_row_that_asks_for_an_edit_fills_its_arrays_and_no_draw_is_plain(field):
    """An edit that is left out would leave a parameter accepted and ignored."""
    args = sampling_of(request(sequence([1], 1), temperature=0.0), asking(**ASKING[field]), start=1)
    assert not args.plain
    (edit,) = (edit for edit in EDITS if field in edit.fields)
    filled, blank = arrays_of(args, edit.arrays), arrays_of(blank_rows(4, VOCAB), edit.arrays)
    assert any(not np.array_equal(one, other) for one, other in zip(filled, blank, strict=True))


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.5, "seed": 4}, True),
        ({"logit_bias": {}}, True),
        ({"min_tokens": 2}, True),
        ({"min_tokens": 3}, False),
        ({"logprobs": 0}, False),
    ],
    ids=str,
)
def test_a_batch_is_plain_when_nothing_is_filled_or_asked_for(params, plain):
    args = sampling_of(asking(), asking(**({"max_tokens": None} | params)), start=2)
    assert args.plain == plain


def test_arrays_of_several_replicas_are_padded_to_the_longest_with_pairs_that_count_for_no_row(monkeypatch):
    monkeypatch.setattr("jpaged.execution.sampling.sampling_batch.stack", lambda mesh, each: each)
    ids = list(range(Bans().listed(4) + 1))
    wide = sampling_of(request(sequence([1], 0), stop_token_ids=ids, min_tokens=5, temperature=0.0))
    short = sampling_of(request(sequence([1], 0), stop_token_ids=[7], min_tokens=5, temperature=0.0))
    first, second, third = of_all(None, [short, wide, sampling_of(asking())], VOCAB)
    rows = [arrays_of(args, BannedTokens).row for args in (first, second, third)]
    assert [len(row) for row in rows] == [PIECE] * 3
    assert [(row == 0).sum() for row in rows] == [1, len(ids), 0]
    assert all((row[row != 0] == NO_ROW).all() for row in rows)
    assert all(arrays is None for arrays in (first.edits[0], second.edits[0], third.edits[0])), "no row of any fills it"


def placed_rows() -> PlacedRows:
    return PlacedRows(make_mesh(1), VOCAB, PairTables(make_mesh(1), VOCAB))


def test_blank_arrays_lie_on_the_devices_and_those_of_rows_are_placed_like_them():
    placed = placed_rows()
    one, two = (placed.put(sampling_of(asking(**params), start=2), None) for params in ({}, {"temperature": 0.5}))
    kinds = zip(EDITS, one.edits, two.edits, strict=True)
    assert [edit for edit, mine, other in kinds if mine is not other] == [
        edit for edit in EDITS if "temperature" in edit.fields
    ]
    assert all(isinstance(array, jax.Array) for array in jax.tree.leaves((one.edits, two.edits)))
    assert one.edits[-1][0].sharding == arrays_of(two, DrawnRows).temperature.sharding
    for mine, blank in zip(one.edits, blank_rows(4, VOCAB).edits, strict=True):
        assert all(map(np.array_equal, mine, blank))


def samples_of(requests: list[Request], start: int) -> list[Sample]:
    return [Sample(r, r.sequences[0], Chunk(r.sequences[0], start, 1, -1, None)) for r in requests]


def test_arrays_of_the_same_rows_are_kept_from_step_to_step_and_on_the_devices():
    asked = [asking(temperature=0.5, top_k=3, seed=7), asking(logprobs=2), asking(frequency_penalty=0.5)]
    rows, placed = SamplerRows(VOCAB), placed_rows()
    first, second = (rows.arrays(ScheduledStep(other_samples=samples_of(asked, start)), 4) for start in (2, 3))
    assert second.position.tolist() == [4, 4, 4, 0]
    assert second.ranked is first.ranked
    kept = [edit for edit, one, two in zip(EDITS, first.edits, second.edits, strict=True) if one and one is two]
    assert kept == [edit for edit in EDITS if {"temperature", "top_k"} & {*edit.fields}]
    one, two = placed.put(first, None), placed.put(second, None)
    assert two.ranked is one.ranked
    assert arrays_of(two, DrawnRows) is arrays_of(one, DrawnRows)
    assert arrays_of(two, WeighedTokens) is not arrays_of(one, WeighedTokens)
    other = placed.put(rows.arrays(ScheduledStep(other_samples=samples_of([asking(), asked[1]], 4)), 4), None)
    assert other.ranked is one.ranked, "its second row asks too"


@given(
    steps=st.lists(st.lists(st.integers(0, 5), unique=True, max_size=4), min_size=1, max_size=6),
    widths=st.lists(st.sampled_from([4, 8]), min_size=6, max_size=6),
)
@settings(max_examples=examples(40), deadline=None)
def test_kept_arrays_are_those_that_a_step_alone_would_have(steps: list[list[int]], widths: list[int]):
    params = [{"temperature": 0.5 * i, "top_k": i, "seed": i} | ({"logprobs": 2} if i % 2 else {}) for i in range(5)]
    asked = [*(asking(**each) for each in params), asking(min_tokens=4, stop_token_ids=[3])]
    rows = SamplerRows(VOCAB)
    for start, (chosen, width) in enumerate(zip(steps, widths, strict=False), 2):
        samples = samples_of([asked[i] for i in chosen], start)
        found, wanted = rows.arrays(ScheduledStep(other_samples=samples), width), sampling_arrays(samples, width, VOCAB)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(wanted)))

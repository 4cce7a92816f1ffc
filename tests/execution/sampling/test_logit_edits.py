"""Edits of logits against their definition, with the newest token on the host or still on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_edit_cases import VOCAB, args_of, arrays_of, edit_logits, expected_logits, request_of, sample_of
from thorough import examples
from transformers import RepetitionPenaltyLogitsProcessor

from jpaged.execution.mesh import make_mesh, replicate
from jpaged.execution.sampling import sampling_batch
from jpaged.execution.sampling.edit import PIECE
from jpaged.execution.sampling.logit_edits import Bans, BiasAndPenalties, TokenMasks
from jpaged.execution.sampling.pair_tables import PairTables
from jpaged.execution.sampling.sampling_batch import PlacedRows, blank_rows, in_pieces, sampling_arrays

edit = jax.jit(edit_logits)


@jax.jit
def edit_by_turns(logits, args, last_tokens):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jpaged.execution.sampling.edit.TURN", 4)
        return edit_logits(logits, args, last_tokens)


TOKEN = st.integers(0, 7)  # few, so that they repeat
MESH = make_mesh(1)
TABLES = PairTables(MESH, VOCAB)
LOGITS = np.random.default_rng(0).normal(0, 4, (4, VOCAB)).astype(np.float32)

REQUESTS = st.builds(
    request_of,
    prompt=st.lists(TOKEN, min_size=1, max_size=6),
    output=st.lists(TOKEN, min_size=1, max_size=8),
    bad_words=st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=4),
    allowed=st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1),
    stop_ids=st.sets(TOKEN, max_size=3),
    min_tokens=st.integers(0, 9),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.8]),
    logit_bias=st.none() | st.dictionaries(TOKEN, st.floats(-100, 100), max_size=5),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=4), st.booleans())
def test_edited_logits_are_those_of_the_definition(requests, pending):
    want = np.stack([expected_logits(LOGITS[row], request) for row, request in enumerate(requests)])
    args, last_tokens = args_of(requests, pending=pending, width=4)
    got = np.asarray(edit(LOGITS, args, np.resize(last_tokens, 4)))
    np.testing.assert_allclose(got[: len(requests)], want, rtol=1e-5, atol=1e-5)
    assert (got[len(requests) :] == LOGITS[len(requests) :]).all(), "padding rows are left alone"


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=4), st.booleans())
def test_pairs_edit_to_the_bit_the_same_in_tables_and_in_lists_by_turns(requests, pending):
    args, last_tokens = args_of(requests, pending=pending, width=4)
    last = np.resize(last_tokens, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_batch, "PIECE", 16)
        tabled = TABLES.of(in_pieces(args, MESH, VOCAB), last)
    assert tabled.tabled and not args.tabled
    whole, by_tables, by_turns = (
        np.asarray(how(LOGITS, given, last)) for how, given in ((edit, args), (edit, tabled), (edit_by_turns, args))
    )
    assert by_tables.tobytes() == by_turns.tobytes() == whole.tobytes()
    wide = edit(np.pad(LOGITS, ((0, 0), (0, 3)), constant_values=-np.inf), tabled, last)  # as of several devices
    assert np.asarray(wide[:, :VOCAB]).tobytes() == whole.tobytes() and np.isneginf(wide[:, VOCAB:]).all()


@settings(max_examples=examples(50), deadline=None)
@given(REQUESTS)
def test_a_pending_token_counts_exactly_as_a_known_one(request_):
    known, last = args_of([request_], pending=False, width=4)
    want = np.asarray(edit(LOGITS, known, np.zeros(4, np.int32)))
    hidden, last = args_of([request_], pending=True, width=4)
    assert np.asarray(edit(LOGITS, hidden, np.resize(last, 4))).tobytes() == want.tobytes()


@pytest.mark.parametrize("penalty", [0.6, 1.0, 1.3, 5.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    prompt, output = [3, 3, 5, 9], [5, 11, 11]
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    want = processor(torch.tensor([prompt + output]), torch.from_numpy(LOGITS[:1].copy()))
    args, last = args_of([request_of(prompt, output, repetition_penalty=penalty)], pending=True)
    np.testing.assert_allclose(edit(LOGITS[:1], args, last), want.numpy(), rtol=1e-6)


def test_every_token_of_a_long_prompt_is_penalised():
    prompt = np.random.default_rng(1).integers(0, VOCAB // 2, 3000).tolist()
    request = request_of(prompt, [1], repetition_penalty=2.0)
    want = expected_logits(LOGITS[0], request)
    assert (want != LOGITS[0]).sum() == VOCAB // 2
    args, last = args_of([request], pending=True)
    np.testing.assert_allclose(edit(LOGITS[:1], args, last)[0], want, rtol=1e-6)


def test_a_bad_word_is_banned_only_where_its_beginning_precedes():
    def banned(output, *bad_words):
        args, last = args_of([request_of([4, 5], output, bad_words=bad_words)], pending=True)
        return np.flatnonzero(np.isneginf(edit(LOGITS[:1], args, last)[0])).tolist()

    assert banned([6, 7, 8], (7, 8, 9)) == [9]
    assert banned([6, 7, 1], (7, 8, 9)) == []
    assert banned([6, 1, 8], (7, 8, 9)) == []
    assert banned([8], (5, 8, 9)) == [], "the prompt is no part of the output"
    assert banned([8], (3,), (8, 2), (8, 8, 1)) == [2, 3]


def test_any_number_of_pairs_has_one_of_two_shapes():
    def placed(**params):
        args, last = args_of([request_of(list(range(VOCAB)), [1], **params)], pending=False)
        there = rows.put(args, last)
        assert there.tabled == args.tabled
        return {array.shape for array in jax.tree.leaves(there) if array.size >= VOCAB}

    rows = PlacedRows(MESH, VOCAB, TABLES)
    tokens, bans = BiasAndPenalties().listed(1), Bans().listed(1)
    assert placed(repetition_penalty=2.0) == placed(min_tokens=2, stop_ids=[3]) == {(tokens,), (bans,)}
    many = [placed(bad_words=[(i % VOCAB,) for i in range(number)]) for number in (bans + 1, 3 * PIECE)]
    assert many == [{(1, VOCAB)}] * 2
    masks = arrays_of(blank_rows(64, 49152), TokenMasks).masks
    assert sum(map(len, masks)) == 64 and all(mask.base.nbytes == 4 for mask in masks), "no mask costs no memory"


@pytest.mark.parametrize("places", [[0], [19], [3, 4, 5], range(8), range(2, 11), range(20)])
def test_any_rows_may_have_masks_and_each_gets_its_own(places):
    plain, masked = request_of([1], [2]), [request_of([1], [2], allowed={row, VOCAB - 1 - row}) for row in range(20)]
    requests = [masked[row] if row in places else plain for row in range(20)]
    logits = np.random.default_rng(1).normal(size=(20, VOCAB)).astype(np.float32)
    want = np.stack([expected_logits(logits[row], request) for row, request in enumerate(requests)])
    args, last_tokens = args_of(requests, pending=False, width=20)
    got = np.asarray(edit_logits(jnp.asarray(logits), args, np.resize(last_tokens, 20)))
    np.testing.assert_allclose(got, want)


@pytest.mark.parametrize(("number", "pieces"), [(1, 1), (8, 1), (9, 2), (32, 4)])
def test_only_masked_rows_travel_to_the_devices(number, pieces, monkeypatch):
    placed, vocab = [], 4096
    rows = PlacedRows(MESH, vocab, PairTables(MESH, vocab))
    requests = [request_of([1], [2]) for _ in range(32)]
    for request in requests[32 - number :]:
        request.allowed_mask = np.full(vocab // 32, 5, np.int32)
    args = sampling_arrays([sample_of(request, pending=False)[0] for request in requests], 32, vocab)
    rows.put(args._replace(edits=(None,) * len(args.edits)), None)  # the blank ones

    def noted(arrays, mesh):
        placed.extend(jax.tree.leaves(arrays))
        return replicate(arrays, mesh)

    monkeypatch.setattr(sampling_batch, "replicate", noted)
    there = arrays_of(rows.put(args, None), TokenMasks)
    assert sum(array.nbytes for array in placed if array.shape[-1] == vocab // 32) == pieces * 8 * vocab // 8
    on_host = arrays_of(args, TokenMasks)
    for mine, theirs in zip(jax.tree.leaves(there), jax.tree.leaves(on_host), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), theirs)

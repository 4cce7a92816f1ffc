"""Ranks and most likely tokens against a sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jpaged.execution.sampling.sampler import rank
from jpaged.execution.sampling.sampling_batch import RANKED, top_size

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

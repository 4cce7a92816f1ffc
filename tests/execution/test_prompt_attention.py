"""Attention within packed prompts sees each prompt as a whole, and no other one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jpaged.execution.batch import StepBatch
from jpaged.execution.prompt_attention import TILE, PromptAttention
from jpaged.model_api import TENSOR_AXIS

MESH = Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
KV_HEADS, SHARE, WIDTH = 2, 2, 24
PADDING, SEQS = 7, 6
"""Rows and prompts that a batch has beyond its own."""


def batch_of(lengths):
    starts = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.pad(starts, (0, SEQS), constant_values=starts[-1]).astype(np.int32)
    tokens = np.zeros(starts[-1] + PADDING, np.int32)
    return StepBatch(tokens, tokens, tokens, starts, np.zeros(len(starts) - 1, np.int32), (), tokens)


def expected(q, k, v, lengths, scale, reach, bias):
    out, start = np.zeros_like(q), 0
    for length in lengths:
        rows = slice(start, start + length)
        distance = np.arange(length) - np.arange(length)[:, None]
        scores = scale * np.einsum("tkqd,skd->kqts", q[rows], k[rows])
        if bias is not None:
            middle = bias.shape[-1] // 2
            scores += bias[:, :, np.clip(distance, -middle, middle) + middle]
        if reach is not None:
            scores = np.where(abs(distance) <= reach, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out[rows] = np.einsum("kqts,skd->tkqd", shares / shares.sum(-1, keepdims=True), v[rows])
        start += length
    return out


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("reach", [None, 5])
@pytest.mark.parametrize("lengths", [(1, 30, 16, 2), (TILE + 9, 3, 2 * TILE), (1, 1, 1)])
def test_each_token_sees_its_own_prompt_in_both_directions(lengths, reach, biased):
    rng, batch = np.random.default_rng(0), batch_of(lengths)
    rows = len(batch.tokens)
    q = rng.normal(size=(rows, KV_HEADS, SHARE, WIDTH)).astype(np.float32)
    k, v = (rng.normal(size=(rows, KV_HEADS, WIDTH)).astype(np.float32) for _ in range(2))
    k[sum(lengths) :] = v[sum(lengths) :] = np.nan if not biased else 1e6  # what padding has is not read
    bias = rng.normal(size=(KV_HEADS, SHARE, 21)).astype(np.float32) if biased else None

    def attend(q, k, v):
        within = PromptAttention(MESH, batch.query_starts, rows, max_query_len=None, impl="xla")
        return within(q, k, v, scale=0.3, reach=reach, distance_bias=bias)

    mine = np.asarray(jax.jit(attend)(q, k, v))[: sum(lengths)]
    want = expected(*(x[: sum(lengths)] for x in (q, k, v)), lengths, 0.3, reach, bias)
    np.testing.assert_allclose(mine, want, atol=2e-5)
    assert jnp.isfinite(mine).all()

"""Every family computes what transformers computes, in every layout."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import CHECKPOINTS, make_checkpoint
from dense_model import load, run_dense, stored_tensors

from jpaged.model_api import CausalLM

TOKENS = np.random.default_rng(6).integers(3, 211, 45)
"""Tokens at which no norm divides by nearly nothing, where two orders of the same float32 sums differ by 1e-4."""

NIGHTLY = (
    "falcon_h1-plain",
    "falcon_h1-norm-first",
    "mixtral-window",
    "qwen3_5_moe",
    "lfm2_moe",
    "glm4_moe_lite",
    "granite4-dense",
)
RECURRENT = (
    "jamba",
    "mamba2",
    "bamba",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2",
    "lfm2_moe",
    "granite4",
    "nemotron_h",
    "falcon_h1",
    "falcon_h1-norm-first",
    "falcon_h1-plain",
)
MULTIPLIES_ROUNDING = (*RECURRENT, "gemma4")
"""Checkpoints that make more of a rounding from token to token, or from layer to layer: Gemma 4 does not scale scores.
"""


class Rounding(NamedTuple):
    """Attributes:
    float32: greatest difference between two orders of the same float32 operations.
    bfloat16: mean difference between bfloat16 and float32.
    """

    float32: float
    bfloat16: float


def at_night(name):
    return pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name


@pytest.fixture(scope="module", params=map(at_night, CHECKPOINTS))
def checkpoint(request, tmp_path_factory):
    """(path, transformers' logits of every position of `TOKENS`, what rounding may do to them).

    Where rounding is multiplied, in transformers too, its logits are those of float64.
    """
    path = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(request.param, path)
    with torch.no_grad():
        logits = logits_in(torch.float32, model)
        if request.param not in MULTIPLIES_ROUNDING:
            return path, logits, Rounding(1e-5, 0.05)
        exact, coarse = logits_in(torch.float64, model), logits_in(torch.bfloat16, model)
        float32, bfloat16 = np.abs(logits - exact).max(), np.abs(coarse - exact).mean()
        return path, exact, Rounding(max(1e-5, 2 * float32), max(0.05, 1.5 * bfloat16))


def logits_in(dtype, model):
    """Return the model's logits of `TOKENS` computed in `dtype`, in which the model is left."""
    logits = model.to(dtype)(torch.tensor(TOKENS)[None]).logits[0]
    return logits.double().numpy() if dtype != torch.float32 else logits.numpy()


@pytest.fixture(scope="module")
def ours(checkpoint):
    """Logits of the plain layout: unrolled, one shard."""
    return run_dense(load(checkpoint[0]), TOKENS)


def test_logits_equal_transformers(checkpoint, ours):
    assert 0.5 < checkpoint[1].std() < 2, "the test model's logits should differ between tokens by about one"
    np.testing.assert_allclose(ours, checkpoint[1], atol=1e-4, rtol=0)


def test_a_scanned_stack_computes_the_same(checkpoint, ours):
    np.testing.assert_allclose(
        run_dense(load(checkpoint[0], stacked=True), TOKENS), ours, atol=checkpoint[2].float32, rtol=0
    )


@pytest.mark.parametrize(
    "shards", [4, pytest.param(2, marks=pytest.mark.nightly), pytest.param(8, marks=pytest.mark.nightly)]
)
def test_padding_for_shards_changes_nothing(checkpoint, ours, shards):
    padded = run_dense(load(checkpoint[0], tensor_parallel=shards), TOKENS)
    assert padded.shape[1] % shards == 0
    np.testing.assert_allclose(padded[:, :211], ours, atol=checkpoint[2].float32, rtol=0)
    assert np.isneginf(padded[:, 211:]).all()


def test_every_tensor_of_the_checkpoint_is_read_once(checkpoint):
    model = load(checkpoint[0])
    read = [name for source in model.weights() for name in source.sources]
    assert sorted(read) == sorted(stored_tensors(checkpoint[0], model).names())


def test_the_contract_is_met(checkpoint):
    model = load(checkpoint[0], stacked=True)
    assert isinstance(model, CausalLM)
    layers = [layer for group in model.layer_groups for layer in group.layers]
    kinds = enumerate(model.layers.kinds)
    kept = [number for number, kind in kinds if kind.group is not None and not kind.shares_kv]
    groups = 2 if checkpoint[0].name.startswith("falcon_h1") else 1  # each of its layers attends and keeps a state
    assert sorted(layers) == sorted(kept * groups)


@pytest.mark.parametrize("stacked", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_bfloat16_stays_close_and_gives_float32_logits(checkpoint, ours, stacked):
    rounded = run_dense(load(checkpoint[0], dtype=jnp.bfloat16, stacked=stacked), TOKENS)
    assert rounded.dtype == np.float32
    assert np.abs(rounded - ours).mean() < checkpoint[2].bfloat16

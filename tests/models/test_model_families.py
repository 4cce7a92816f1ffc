"""Every family computes what transformers computes, in every layout."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import CHECKPOINTS, make_checkpoint
from dense_model import load, run_dense
from safetensors import safe_open

from jpaged.model_api import CausalLM

TOKENS = np.random.default_rng(0).integers(3, 211, 45)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request, tmp_path_factory):
    """(path, transformers' float32 logits of every position of `TOKENS`)."""
    path = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(request.param, path)
    with torch.no_grad():
        return path, model(torch.tensor(TOKENS)[None]).logits[0].numpy()


@pytest.fixture(scope="module")
def ours(checkpoint):
    """Logits of the plain layout: unrolled, one shard."""
    return run_dense(load(checkpoint[0]), TOKENS)


def test_logits_equal_transformers(checkpoint, ours):
    assert 0.5 < checkpoint[1].std() < 2, "the test model's logits should differ between tokens by about one"
    np.testing.assert_allclose(ours, checkpoint[1], atol=1e-4, rtol=0)


def test_a_scanned_stack_computes_the_same(checkpoint, ours):
    np.testing.assert_allclose(run_dense(load(checkpoint[0], stacked=True), TOKENS), ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_padding_for_shards_changes_nothing(checkpoint, ours, shards):
    padded = run_dense(load(checkpoint[0], tensor_parallel=shards), TOKENS)
    assert padded.shape[1] % shards == 0
    np.testing.assert_allclose(padded[:, :211], ours, atol=1e-5, rtol=0)
    assert np.isneginf(padded[:, 211:]).all()


def test_every_tensor_of_the_checkpoint_is_read_once(checkpoint):
    read = [name for source in load(checkpoint[0]).weights() for name in source.sources]
    with safe_open(checkpoint[0] / "model.safetensors", framework="np") as tensors:
        assert sorted(read) == sorted(tensors.keys())


def test_the_contract_is_met(checkpoint):
    model = load(checkpoint[0], stacked=True)
    assert isinstance(model, CausalLM)
    layers = [layer for group in model.layer_groups for layer in group.layers]
    kept = [number for number, kind in enumerate(model.layers.kinds) if not kind.shares_kv]
    assert sorted(layers) == kept


@pytest.mark.parametrize("stacked", [False, True])
def test_bfloat16_stays_close_and_gives_float32_logits(checkpoint, ours, stacked):
    rounded = run_dense(load(checkpoint[0], dtype=jnp.bfloat16, stacked=stacked), TOKENS)
    assert rounded.dtype == np.float32
    assert np.abs(rounded - ours).mean() < 0.05

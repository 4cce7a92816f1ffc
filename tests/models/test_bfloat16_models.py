"""Families compute with a CPU's bfloat16 tiles what transformers computes in float32, but for rounding."""

import jax
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from dense_model import run_dense
from flax import nnx

from jpaged.loading import load_model
from jpaged.loading.load import convert_checkpoint
from pallas_kernels.tiled_floats import TiledFloats

TOKENS = np.random.default_rng(0).integers(3, 211, 20)
FAMILIES = (
    "llama",
    "gemma3",
    "mixtral",
    "opt-projected",
    "deepseek_v2",
    pytest.param("jamba", marks=pytest.mark.nightly),
)


def tiles_of(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, TiledFloats))
    return [leaf for leaf in leaves if isinstance(leaf, TiledFloats)]


def logits(loaded):
    return run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)[:, : loaded.model.vocab_size]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_but_for_rounding_to_bfloat16(name, tmp_path):
    """Errors are at most 3 % of the logits' spread, whose weights are wider than real ones."""
    judge = make_checkpoint(name, tmp_path)
    loaded = load_model(tmp_path, dtype="bfloat16")
    assert tiles_of(loaded.params)
    with torch.no_grad():
        want = judge(torch.tensor(TOKENS)[None]).logits[0].numpy()
    error = np.sqrt(np.mean((logits(loaded) - want) ** 2)) / np.std(want)
    assert 0 < error < 0.03


def test_a_converted_checkpoint_of_bfloat16_gives_the_same_tiles(tmp_path):
    make_checkpoint("llama", tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "saved", dtype="bfloat16")
    first, second = (load_model(tmp_path / name, dtype="bfloat16") for name in ("source", "saved"))
    for one, other in zip(tiles_of(first.params), tiles_of(second.params), strict=True):
        np.testing.assert_array_equal(one.bits, other.bits)

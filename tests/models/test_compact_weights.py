"""Families on a CPU hold the matrices of a bfloat16 checkpoint as they are, and compute what torch does in float32."""

import jax
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from dense_model import run_dense
from flax import nnx
from transformers import AutoModelForCausalLM

from jpaged.loading import load_model
from jpaged.loading.load import convert_checkpoint
from jpaged.model_api import Bfloat16Tiles
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


def bfloat16_checkpoint(name, folder):
    """Saves a checkpoint in bfloat16; returns the model of the same numbers, computing in float32."""
    model = make_checkpoint(name, folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **plain
    )  # `float()` leaves rotations rounded


def tiles_of(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, TiledFloats))
    return [leaf for leaf in leaves if isinstance(leaf, TiledFloats)]


def logits(loaded):
    return run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)[:, : loaded.model.vocab_size]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_torchs_float32_ones_of_the_same_numbers(name, tmp_path):
    judge = bfloat16_checkpoint(name, tmp_path)
    loaded = load_model(tmp_path, dtype="float32", compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT)
    tiles = tiles_of(loaded.params)
    assert tiles and all(matrix.product == "float32" for matrix in tiles)
    with torch.no_grad():
        want = judge(torch.tensor(TOKENS)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits(loaded), want, atol=1e-4)
    plain = load_model(tmp_path, dtype="float32")
    assert not tiles_of(plain.params)
    np.testing.assert_allclose(logits(loaded), logits(plain), atol=1e-5)


def test_matrices_that_are_stored_in_float32_stay_so(tmp_path):
    make_checkpoint("llama", tmp_path)
    assert not tiles_of(load_model(tmp_path, dtype="float32", compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT).params)


def test_a_converted_checkpoint_of_bfloat16_gives_the_same_tiles(tmp_path):
    bfloat16_checkpoint("llama", tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "saved")
    first, second = (
        load_model(tmp_path / name, dtype="float32", compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT)
        for name in ("source", "saved")
    )
    assert tiles_of(first.params)
    for one, other in zip(tiles_of(first.params), tiles_of(second.params), strict=True):
        np.testing.assert_array_equal(one.bits, other.bits)

"""Every family computes with quantised matrices what it computes with their values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from dense_model import run_dense
from flax import nnx

from jpaged.loading import convert_checkpoint, load_model
from pallas_kernels.quantised import QuantisedMatrix
from pallas_kernels.tiled import TiledMatrix

TOKENS = np.random.default_rng(0).integers(3, 211, 20)


def is_quantised(leaf):
    return isinstance(leaf, QuantisedMatrix)


def dequantised(params):
    return jax.tree.map(lambda x: x.dequantised(jnp.float32) if is_quantised(x) else x, params, is_leaf=is_quantised)


NAMES = ("llama", "qwen2", "gemma3", "opt-projected", "cohere2", "llama4", "deepseek_v2")
RECURRENT = ("jamba", "qwen3_next", "mamba2", "bamba", "qwen3_5", "lfm2")


OFTEN = {"int8": ("llama", "gemma3", "opt-projected", "deepseek_v2", "jamba"), "int4": ("llama", "opt-projected")}
"""By day; the formats meet the same layers, whatever the family."""


def cases():
    for quantization, stacked in (("int8", False), ("int4", True)):
        for name in NAMES + RECURRENT:
            marks = () if name in OFTEN[quantization] else pytest.mark.nightly
            yield pytest.param(quantization, stacked, name, marks=marks)


@pytest.mark.parametrize(("quantization", "stacked", "name"), list(cases()))
def test_quantised_products_are_those_of_the_values(name, quantization, stacked, tmp_path, monkeypatch):
    """XLA multiplies: a CPU's own products round activations."""
    monkeypatch.setattr("jpaged.loading.build_context._product_impl", lambda mesh, impl: "xla")
    make_checkpoint(name, tmp_path)
    loaded = load_model(tmp_path, dtype="float32", quantization=quantization, stacked=stacked)
    assert any(map(is_quantised, jax.tree.leaves(loaded.params, is_leaf=is_quantised)))
    found = run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)
    want = run_dense(nnx.merge(loaded.graphdef, dequantised(loaded.params)), TOKENS)
    known = slice(loaded.model.vocab_size)
    rounding = 1e-4 if name in RECURRENT else 2e-5  # which a recurrence may multiply, token by token
    np.testing.assert_allclose(found[:, known], want[:, known], atol=rounding * np.abs(want[:, known]).max())


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_cpus_tiles_give_the_values_products_but_for_rounded_activations(name, quantization, tmp_path):
    make_checkpoint(name, tmp_path)
    loaded = load_model(tmp_path, dtype="float32", quantization=quantization)
    leaves = jax.tree.leaves(loaded.params, is_leaf=is_quantised)
    assert all(isinstance(leaf, TiledMatrix) for leaf in leaves if is_quantised(leaf))
    found = run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)[:, : loaded.model.vocab_size]
    want = run_dense(nnx.merge(loaded.graphdef, dequantised(loaded.params)), TOKENS)[:, : loaded.model.vocab_size]
    assert 0 < np.sqrt(np.mean((found - want) ** 2)) < 0.06 * np.std(want)


_PLAIN = ("mlp.gate.weight", "router.weight", "shared_expert_gate.weight")
"""Matrices of routers and of one output, which no quantisation rounds."""


def rounded_to_int8(model):
    """Round a model of transformers, by the definition: each output's largest weight becomes 127 steps."""
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or name.endswith(_PLAIN):
            continue
        inputs = -2 if model.config.model_type == "gpt_oss" and ".experts." in name else -1
        step = weight.detach().abs().amax(inputs, keepdim=True) / 127
        if not name.endswith("_bias"):  # of experts, which has two dimensions too
            weight.data = (weight / step).round() * step
    return model


@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", "gpt_oss", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mixtral", "qwen2_moe"))],
)
def test_codes_of_experts_have_the_values_that_transformers_is_given(name, tmp_path):
    model = rounded_to_int8(make_checkpoint(name, tmp_path))
    with torch.inference_mode():
        want = model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    loaded = load_model(tmp_path, dtype="float32", quantization="int8")
    tables = [leaf for leaf in jax.tree.leaves(loaded.params, is_leaf=is_quantised) if leaf.ndim == 3]
    assert tables
    assert all(isinstance(leaf, TiledMatrix) for leaf in tables)
    found = run_dense(nnx.merge(loaded.graphdef, dequantised(loaded.params)), TOKENS)[:, : loaded.model.vocab_size]
    np.testing.assert_allclose(found, want, atol=5e-5 * np.abs(want).max())
    in_codes = run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)[:, : loaded.model.vocab_size]
    assert np.sqrt(np.mean((in_codes - want) ** 2)) < 0.06 * np.std(want)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_converted_checkpoint_keeps_the_codes_of_experts(quantization, tmp_path):
    make_checkpoint("qwen3_moe", tmp_path / "plain")
    convert_checkpoint(tmp_path / "plain", tmp_path / "saved", quantization=quantization)
    loaded = load_model(tmp_path / "plain", quantization=quantization).params
    saved = load_model(tmp_path / "saved").params
    assert jax.tree.structure(saved) == jax.tree.structure(loaded)
    for one, other in zip(jax.tree.leaves(saved), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(one, other)

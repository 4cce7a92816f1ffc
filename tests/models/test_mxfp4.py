"""GPT-OSS in MXFP4 as published: codes stay as they are, and logits are those of transformers' dequantised values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dense_model import run_dense
from flax import nnx
from mxfp4_checkpoint import make_mxfp4

from jpaged.loading import convert_checkpoint, load_model
from jpaged.loading.parameters.targets import flat_values
from jpaged.loading.parameters.weights import abstract_params
from pallas_kernels.quantised import INT8, QuantisedMatrix

TOKENS = np.random.default_rng(0).integers(3, 211, 20)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mxfp4")
    return folder, make_mxfp4(folder)


@pytest.fixture(scope="module")
def loaded(published):
    return load_model(published[0], dtype="float32")


def experts(params):
    return {
        path: value
        for path, value in flat_values(params).items()
        if path[-2] in ("gate_up", "down") and path[-1] == "weight"
    }


def test_experts_take_four_and_a_quarter_bits_and_nothing_else_is_quantised(loaded):
    found = experts(loaded.params)
    assert len(found) == 2 * loaded.config.num_hidden_layers
    for path, matrix in found.items():
        assert isinstance(matrix, QuantisedMatrix), path
        bits = 8 * sum(part.nbytes for part in jax.tree.leaves(matrix))
        assert bits == 4.25 * np.prod(matrix.shape)
    others = [value for path, value in flat_values(loaded.params).items() if path not in found]
    assert not any(isinstance(value, QuantisedMatrix) for value in others)


def test_logits_are_those_of_the_dequantised_model(published, loaded):
    with torch.inference_mode():
        want = published[1](torch.tensor(TOKENS)[None]).logits[0].numpy()
    found = run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)
    np.testing.assert_allclose(found[:, : loaded.model.vocab_size], want, atol=1e-4)


def test_values_are_transformers_to_the_last_bit(published, loaded):
    matrices = [value for path, value in sorted(experts(loaded.params).items(), key=str) if path[-2] == "down"]
    for layer, matrix in enumerate(matrices):
        want = published[1].model.layers[layer].mlp.experts.down_proj.detach().numpy()
        np.testing.assert_array_equal(matrix.dequantised(jnp.float32), want)


def test_shapes_without_weights_are_those_that_are_loaded(published, loaded):
    from jpaged.loading.weight_formats.methods import NamedCodes
    from jpaged.loading.weight_formats.mxfp4 import MXFP4

    names = NamedCodes((name for source in loaded.model.weights() for name in source.sources), MXFP4())
    planned = abstract_params(loaded.model, loaded.mesh, reader=names)
    described = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (planned, loaded.params)]
    assert jax.tree.leaves(described[0]) == jax.tree.leaves(described[1])


def test_a_converted_checkpoint_keeps_the_codes(published, loaded, tmp_path):
    convert_checkpoint(published[0], tmp_path / "ours")
    again = load_model(tmp_path / "ours", dtype="float32")
    for path, matrix in experts(again.params).items():
        for found, want in zip(jax.tree.leaves(matrix), jax.tree.leaves(experts(loaded.params)[path]), strict=True):
            np.testing.assert_array_equal(found, want)


def test_another_quantisation_can_be_asked_for(published):
    params = load_model(published[0], dtype="float32", quantization="int8").params
    assert {matrix.codec for matrix in experts(params).values()} == {INT8}

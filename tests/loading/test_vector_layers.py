"""Dense modules of sentence-transformers turn a prompt's vector into torch's, and other uses of them are refused."""

import numpy as np
import pytest
import torch

from jpaged.loading.state_dict import StateDictReader
from jpaged.loading.vector_layers import VECTOR_ACTIVATIONS, read_dense

RNG = np.random.default_rng(0)
X = RNG.normal(size=12).astype(np.float32)


def tensors(outputs, *, bias=True, residual=False):
    made = {"linear.weight": RNG.normal(size=(outputs, 12)).astype(np.float32)}
    if bias:
        made["linear.bias"] = RNG.normal(size=outputs).astype(np.float32)
    if residual:
        made["residual.weight"] = RNG.normal(size=(outputs, 12)).astype(np.float32)
    return made


@pytest.mark.parametrize("name", ["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"])
def test_activations_are_torchs(name):
    made = tensors(7)
    linear = made["linear.weight"] @ X + made["linear.bias"]
    expected = getattr(torch.nn, name)()(torch.tensor(linear)).numpy()
    layer = read_dense(StateDictReader(made), {"activation_function": f"torch.nn.modules.activation.{name}"})
    np.testing.assert_allclose(layer(X), expected, atol=1e-6)


def test_a_layer_without_a_named_activation_has_tanh():
    made = tensors(7, bias=False)
    np.testing.assert_allclose(read_dense(StateDictReader(made), {})(X), np.tanh(made["linear.weight"] @ X), atol=1e-6)


@pytest.mark.parametrize("outputs", [12, 5])
def test_a_residual_adds_the_input_or_its_projection(outputs):
    made = tensors(outputs, bias=False, residual=outputs != 12)
    layer = read_dense(StateDictReader(made), {"use_residual": True})
    added = X if outputs == 12 else made["residual.weight"] @ X
    np.testing.assert_allclose(layer(X), np.tanh(made["linear.weight"] @ X) + added, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"module_input_name": "token_embeddings"}, "module_input_name='token_embeddings'"),
        ({"module_output_name": "scores"}, "module_output_name='scores'"),
        ({"activation_function": "torch.nn.modules.activation.Mish"}, "followed by 'mish'; known activations"),
    ],
)
def test_other_uses_are_refused(fields, message):
    assert "mish" not in VECTOR_ACTIVATIONS
    with pytest.raises(ValueError, match=message):
        read_dense(StateDictReader(tensors(3)), fields)

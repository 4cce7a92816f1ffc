"""Layers that turn a prompt's vector into another one, or into classes: heads of encoders, and Dense modules.

They are small and are computed on the host, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jpaged.loading.tensor_reader import TensorReader


def _gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()], np.float32)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


VECTOR_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "silu": _silu,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
"""Activations by the names of configs, in small letters; sentence-transformers' modules are named so too."""


@dataclass(frozen=True)
class Scale:
    """A LayerNorm: ``(x - mean) / sqrt(var + eps) * scale + bias``."""

    scale: np.ndarray
    bias: np.ndarray | None
    eps: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean()
        normed = centred / np.sqrt(np.mean(centred * centred) + self.eps) * self.scale
        return normed if self.bias is None else normed + self.bias


@dataclass(frozen=True)
class VectorLayer:
    """``norm(activation(weight @ x + bias) + residual @ x)``, the last term only with `adds_input`.

    Attributes:
        weight: [outputs, inputs].
        activation: one of `VECTOR_ACTIVATIONS`.
        residual: [outputs, inputs]; None = the input is added as it is.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None
    activation: str = "identity"
    norm: Scale | None = None
    adds_input: bool = False
    residual: np.ndarray | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = self.weight @ x
        y = VECTOR_ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)
        if self.adds_input:
            y = y + (x if self.residual is None else self.residual @ x)
        return y if self.norm is None else self.norm(y)


@dataclass(frozen=True)
class VectorLayers:
    """Layers one after another; at least one."""

    layers: Sequence[VectorLayer]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the last layer's result for a vector."""
        for layer in self.layers:
            x = layer(x)
        return x

    def __len__(self) -> int:
        """Return how many numbers come out."""
        return len(self.layers[-1].weight)


def read_layer(
    reader: TensorReader, name: str, activation: str = "identity", norm: str | None = None, eps: float = 0.0
) -> VectorLayer:
    """Read the tensors ``{name}.weight`` and, if there is one, ``{name}.bias``.

    Args:
        norm: name of the norm that follows the activation; None = none does.

    Raises:
        ValueError: the activation is unknown.
    """
    if activation not in VECTOR_ACTIVATIONS:
        known = ", ".join(VECTOR_ACTIVATIONS)
        raise ValueError(f"{reader.location}: {name} is followed by {activation!r}; known activations: {known}")
    after = None if norm is None else Scale(_read(reader, f"{norm}.weight"), _bias(reader, norm), eps)
    return VectorLayer(_read(reader, f"{name}.weight"), _bias(reader, name), activation, after)


def read_dense(reader: TensorReader, fields: Mapping[str, Any]) -> VectorLayer:
    """Read a Dense module of sentence-transformers.

    Args:
        fields: its config.json.

    Raises:
        ValueError: it does not turn a prompt's vector into another one, or its activation is unknown.
    """
    for name in ("module_input_name", "module_output_name"):
        if fields.get(name) not in (None, "sentence_embedding"):
            raise ValueError(
                f"{reader.location}: Dense has {name}={fields[name]!r}; only 'sentence_embedding' is supported"
            )
    activation = str(fields.get("activation_function", "Tanh")).rpartition(".")[2].lower()
    layer = read_layer(reader, "linear", activation)
    if not fields.get("use_residual", False):
        return layer
    outputs, inputs = layer.weight.shape
    return replace(layer, adds_input=True, residual=None if outputs == inputs else _read(reader, "residual.weight"))


def _bias(reader: TensorReader, name: str) -> np.ndarray | None:
    return _read(reader, f"{name}.bias") if f"{name}.bias" in set(reader.names()) else None


def _read(reader: TensorReader, name: str) -> np.ndarray:
    return np.asarray(reader.read(name)).astype(np.float32)

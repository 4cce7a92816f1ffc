"""Dots, norms, MLPs and the vocabulary, shared by every family.

Dimension names beyond those of `jpaged.model_api`: ``mlp`` is the MLP's width padded to a multiple of the
shards. Weights of dots are matrices, and fused ones are fused
along their columns: with a further dimension of 2 or 6, a TPU would tile them so that every step copies them.
Norms are computed in float32; everything else in the parameters' dtype, float32 parameters with
float32 products on every platform. Parameters are held unsharded here; `weights` methods say how each is
split over the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import LIVE_ROWS, PRODUCT_IMPL, TENSOR_AXIS, WeightSource, padded
from pallas_kernels.matmul import matmul, matmul_table
from pallas_kernels.quantised import QuantisedMatrix, quantised_dot, quantised_table_dot

from . import weights as convert
from .bank import Bank

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}
"""Under the names Hugging Face configs use."""

INIT_STDDEV = 0.02
"""Of random weights, used where no checkpoint is loaded (tests, benchmarks at published shapes)."""


def check_activation(name: str, field: str) -> str:
    """`name` if it is known; raises ValueError naming the config's `field` otherwise."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{field}={name!r} is not supported; known: {', '.join(sorted(ACTIVATIONS))}")
    return name


def random_param(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param:
    """A normally distributed parameter with standard deviation `INIT_STDDEV`."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(INIT_STDDEV, dtype))


def zeros_param(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param:
    """A bias before a checkpoint is loaded."""
    return nnx.Param(jnp.zeros(shape, dtype))


def dot(
    x: Float[Array, "tokens inputs"],
    weight: Float[Array, "inputs outputs"] | QuantisedMatrix | Bank,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "tokens outputs"]:
    """``x @ weight``, in `out_dtype` or that of `x`; from `LIVE_ROWS` on, rows may be 0."""
    bank = weight if isinstance(weight, Bank) else Bank((weight,), 0)
    if isinstance(bank.matrices[0], QuantisedMatrix):
        return bank.multiply(partial(quantised_dot, out_dtype=out_dtype), x)
    options = {"rows": LIVE_ROWS.get(), "impl": PRODUCT_IMPL.get()}
    return matmul(x, bank.matrices, bank.index, out_dtype=out_dtype, **options)


def embed(
    table: Float[Array, "vocab embed"] | QuantisedMatrix, tokens: Int[Array, " tokens"], dtype: jnp.dtype
) -> Float[Array, "tokens embed"]:
    """Rows of the embedding table; ids out of range (padding) read some row, as nobody uses the result.

    Args:
        dtype: of the rows, where the table is quantised.
    """
    if isinstance(table, QuantisedMatrix):
        return table.rows(tokens).dequantised(dtype)
    return jnp.take(table, tokens, axis=0, mode="clip")


def vocab_logits(
    hidden: Float[Array, "seqs embed"],
    table: Float[Array, "vocab embed"] | QuantisedMatrix,
    vocab_size: int,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "seqs vocab"]:
    """Float32 logits, times `scale`, ``soft_cap * tanh(x / soft_cap)`` if capped, -inf for the vocabulary's padding.

    From `LIVE_ROWS` on they mean nothing.
    """
    if isinstance(table, QuantisedMatrix):
        logits = quantised_table_dot(hidden, table)
    else:
        logits = matmul_table(hidden, table, rows=LIVE_ROWS.get(), impl=PRODUCT_IMPL.get())
    if scale is not None:
        logits = scale * logits
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if table.shape[0] > vocab_size:
        logits = jnp.where(jnp.arange(table.shape[0]) < vocab_size, logits, -jnp.inf)
    return logits


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * (offset + scale)`` over the last dimension (Zhang & Sennrich, 2019).

    `offset` is 1 for Gemma, whose checkpoints store the scale's distance from one. Without `affine` there is no scale.
    """

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype, offset: float = 0.0, affine: bool = True):
        self.scale = nnx.Param(jnp.full((size,), 1.0 - offset, dtype)) if affine else None
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.scale is not None:
            wide = wide * (self.offset + self.scale[...].astype(jnp.float32))
        return wide.astype(x.dtype)

    def weights(self, path: tuple[str, ...], name: str, layer: int | None = None) -> Iterator[WeightSource]:
        """`path` is this norm's place in its layer or model, `name` its tensors' prefix in the checkpoint."""
        if self.scale is not None:
            yield WeightSource((*path, "scale"), (f"{name}.weight",), convert.as_stored, P(None), layer)


class LayerNorm(nnx.Module):
    """``(x - mean) / sqrt(var + eps) * scale + bias`` over the last dimension (Ba et al., 2016).

    Without `affine` there are no parameters, as in the OPT-shaped Galactica models; Cohere's has no bias only.
    """

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype, affine: bool = True, bias: bool = True):
        self.scale = nnx.Param(jnp.ones((size,), dtype)) if affine else None
        self.bias = zeros_param((size,), dtype) if affine and bias else None
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.scale is not None:
            wide = wide * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            wide = wide + self.bias[...].astype(jnp.float32)
        return wide.astype(x.dtype)

    def weights(self, path: tuple[str, ...], name: str, layer: int | None = None) -> Iterator[WeightSource]:
        """See `RMSNorm.weights`."""
        if self.scale is not None:
            yield WeightSource((*path, "scale"), (f"{name}.weight",), convert.as_stored, P(None), layer)
        if self.bias is not None:
            yield WeightSource((*path, "bias"), (f"{name}.bias",), convert.as_stored, P(None), layer)


class GatedMLP(nnx.Module):
    """``down(act(gate(x)) * up(x))`` (Shazeer, 2020), gate and up fused into one dot.

    gate_up [embed, 2 * mlp] holds each shard's gate columns and then its up columns, so that a shard finds both in
    its own part; down [mlp, embed]. Columns beyond the checkpoint's width are zero.
    """

    def __init__(
        self,
        embed: int,
        width: int,
        activation: str,
        *,
        bias: bool,
        tensor_parallel: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        mlp = padded(width, tensor_parallel)
        self.gate_up = random_param(rngs, (embed, 2 * mlp), dtype)
        self.down = random_param(rngs, (mlp, embed), dtype)
        self.gate_up_bias = zeros_param((2 * mlp,), dtype) if bias else None
        self.down_bias = zeros_param((embed,), dtype) if bias else None
        self.activation = activation
        self.shards = tensor_parallel

    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        both = dot(x, self.gate_up[...])
        if self.gate_up_bias is not None:
            both = both + self.gate_up_bias[...]
        gate, up = jnp.split(both.reshape(x.shape[0], self.shards, -1), 2, axis=-1)
        inner = ACTIVATIONS[self.activation](gate) * up
        out = dot(inner.reshape(x.shape[0], -1), self.down[...])
        return out if self.down_bias is None else out + self.down_bias[...]

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Tensors ``{name}.gate_proj``, ``.up_proj`` and ``.down_proj``."""
        mlp, embed = self.down.shape[-2:]
        fuse = convert.fuse_gate_up(mlp, self.shards)
        gate_up = f"{name}.gate_proj", f"{name}.up_proj"
        sources = [
            ("gate_up", gate_up, "weight", fuse, P(None, TENSOR_AXIS)),
            ("gate_up_bias", gate_up, "bias", fuse, P(TENSOR_AXIS)),
            ("down", (f"{name}.down_proj",), "weight", convert.linear(mlp, embed), P(TENSOR_AXIS, None)),
            ("down_bias", (f"{name}.down_proj",), "bias", convert.as_stored, P(None)),
        ]
        for param, tensors, kind, how, partition in sources:
            if getattr(self, param) is not None:
                names, contracted = tuple(f"{t}.{kind}" for t in tensors), -2 if kind == "weight" else None
                yield WeightSource((*path, param), names, how, partition, layer, contracted)

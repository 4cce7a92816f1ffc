"""Computes a norm over all heads of a token together, which may lie on several shards, padded or repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, BuildContext, WeightSource

from .parameters import constant_param


class HeadsNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * scale`` over the heads and lanes of a token (OLMo 2 and 3).

    scale [places * head_dim], the places being those of `HeadLayout`: a slot for keys, a slot and a query of it for
    queries. Heads that lie in several places are there equally often, so that the mean over places is that over heads;
    padding heads are zero and are not counted.

    Args:
        head_of_place: the checkpoint's head in each place; -1 for padding.
    """

    def __init__(self, head_of_place: Sequence[int | Sequence[int]], head_dim: int, eps: float, build: BuildContext):
        heads = np.array(head_of_place).reshape(-1)
        self.heads = tuple(heads.tolist())
        self.scale = constant_param(build, (len(heads) * head_dim,), 1.0)
        self.count = int((heads >= 0).sum()) * head_dim
        self.eps = eps

    def __call__(self, x: Float[Array, "tokens *places head_dim"]) -> Float[Array, "tokens *places head_dim"]:
        wide = x.astype(jnp.float32)
        squares = jnp.square(wide).sum(axis=tuple(range(1, x.ndim)), keepdims=True)
        wide = wide * jax.lax.rsqrt(squares / self.count + self.eps)
        return (wide * self.scale[...].astype(jnp.float32).reshape(x.shape[1:])).astype(x.dtype)

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the source of ``{name}.weight``, all heads' scales after one another."""
        heads = np.array(self.heads)

        def convert(stored: np.ndarray) -> np.ndarray:
            by_head = stored.reshape(int(heads.max()) + 1, -1)
            return np.where(heads[:, None] < 0, 0, by_head[heads]).astype(stored.dtype).reshape(-1)

        yield WeightSource((*path, "scale"), (f"{name}.weight",), convert, P(TENSOR_AXIS), layer)

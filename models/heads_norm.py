"""Norms queries and keys by scales that differ between heads, which may lie on several shards, padded or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


class EachHeadNorm(nnx.Module):
    """``(x - mean) / sqrt(var + eps) * scale`` of each head, by a scale of the head's own (Cohere, StableLM 2).

    scale [places * head_dim], the places being those of `HeadLayout`, see `HeadsNorm`.

    Args:
        head_of_place: the checkpoint's head in each place; -1 for padding.
        rotates_neighbours: see `Heads`; the scale's numbers are reordered like the heads' rows.
    """

    def __init__(
        self,
        head_of_place: Sequence[int | Sequence[int]],
        head_dim: int,
        eps: float,
        build: BuildContext,
        *,
        rotates_neighbours: bool = False,
    ):
        heads = np.array(head_of_place).reshape(-1)
        self.heads = tuple(heads.tolist())
        self.scale = constant_param(build, (len(heads) * head_dim,), 1.0)
        self.eps = eps
        self.rotates_neighbours = rotates_neighbours

    @classmethod
    def maker(cls, head_dim: int, eps: float, build: BuildContext, *, rotates_neighbours: bool) -> Callable[..., Any]:
        """Return what `Attention` takes to make the norms of queries and keys."""

        def make(head_of_place: Sequence[Any]) -> EachHeadNorm:
            return cls(head_of_place, head_dim, eps, build, rotates_neighbours=rotates_neighbours)

        make.of_places = True  # type: ignore[attr-defined]
        return make

    def __call__(self, x: Float[Array, "tokens *places head_dim"]) -> Float[Array, "tokens *places head_dim"]:
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32).reshape(x.shape[1:])).astype(x.dtype)

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the source of ``{name}.weight`` [heads, head_dim], or of a tensor a head if `name` has ``{head}``."""
        heads = np.array(self.heads)
        names = [f"{name.format(head=head)}.weight" for head in range(int(heads.max()) + 1 if "{head}" in name else 1)]

        def convert(*stored: np.ndarray) -> np.ndarray:
            by_head = np.stack(stored) if len(stored) > 1 else stored[0].reshape(int(heads.max()) + 1, -1)
            if self.rotates_neighbours:
                by_head = np.concatenate([by_head[:, ::2], by_head[:, 1::2]], axis=1)
            return np.where(heads[:, None] < 0, 0, by_head[heads]).astype(by_head.dtype).reshape(-1)

        yield WeightSource((*path, "scale"), tuple(names), convert, P(TENSOR_AXIS), layer)

"""Low-rank additions to a product: ``x @ W + (x @ down[place].T) @ up[place]``, each row with the adapter of its place.

Rows of several adapters, and of none, share one product with W. On a processor the adapters follow one another, and one
that no row has costs nothing. On accelerators all go through two products, whose columns of other adapters are zeroed
between them: a few adapters fill what the matrix units take anyway, and a branch would cost more (Punica, 2023, and
S-LoRA, 2023, section 5.2, gather instead).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight", "down", "up", "place", "present", "at"),
    meta_fields=("branches",),
)
@dataclass(frozen=True)
class AdaptedMatrix:
    """Stands where a matrix ``[inputs, outputs]`` would, in a step some of whose rows have adapters.

    Attributes:
        weight: the matrix itself, in any form that a product takes.
        down: ``[adapters, rank, inputs]``, or of several layers, ``[layers, adapters, rank, inputs]``: inputs come last
            because the tiles in which accelerators hold numbers are wider than a rank.
        up: ``[adapters, rank, outputs]``, scales included, or of several layers.
        place: the adapter of each row; -1 = none.
        present: whether any row has an adapter that changes this matrix.
        at: which of several layers is meant; None = `down` and `up` are those of one.
        branches: whether adapters that are not present are left out by a branch.
    """

    weight: Any
    down: Float[Array, "*layers adapters rank inputs"]
    up: Float[Array, "*layers adapters rank outputs"]
    place: Int[Array, " rows"]
    present: Bool[Array, " adapters"]
    at: int | Int[Array, ""] | None = None
    branches: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    def __getitem__(self, key: Any) -> AdaptedMatrix:
        if key is not Ellipsis:
            raise TypeError(f"an adapted matrix cannot be indexed with {key!r}: only products understand it")
        return self

    def of_layer(self, weight: Any, at: int | Int[Array, ""]) -> AdaptedMatrix:
        """Return the adapted matrix of layer `at`: that layer's `weight`, with the same adapters."""
        return replace(self, weight=weight, at=at)

    def addition(self, x: Float[Array, "rows inputs"]) -> Float[Array, "rows outputs"]:
        """Return the sum that the rows' adapters add to the product."""
        down, up = self.down, self.up
        if self.at is not None:
            down, up = (jax.lax.dynamic_index_in_dim(part, self.at, keepdims=False) for part in (down, up))
        down, up = down.astype(x.dtype), up.astype(x.dtype)
        if self.branches:
            return low_rank_in_turn(x, down, up, self.place, self.present)
        return low_rank_at_once(x, down, up, self.place)


def low_rank_in_turn(
    x: Float[Array, "rows inputs"],
    down: Float[Array, "adapters rank inputs"],
    up: Float[Array, "adapters rank outputs"],
    place: Int[Array, " rows"],
    present: Bool[Array, " adapters"],
) -> Float[Array, "rows outputs"]:
    """Add up the adapters that are present, one after another; a row's bits do not depend on which place is whose."""

    def one(adapter: Int[Array, ""], out: Array) -> Array:
        def add(out: Array) -> Array:
            own_down, own_up = (jax.lax.dynamic_index_in_dim(part, adapter, keepdims=False) for part in (down, up))
            return jnp.where((place == adapter)[:, None], _dot(_dot(x, own_down.T), own_up), out)

        return jax.lax.cond(jnp.asarray(present)[adapter], add, lambda out: out, out)

    return jax.lax.fori_loop(0, len(down), one, jnp.zeros((len(x), up.shape[-1]), x.dtype))


def low_rank_at_once(
    x: Float[Array, "rows inputs"],
    down: Float[Array, "adapters rank inputs"],
    up: Float[Array, "adapters rank outputs"],
    place: Int[Array, " rows"],
) -> Float[Array, "rows outputs"]:
    """Multiply all rows with all adapters, keeping between the two products only each row's own."""
    adapters, rank, inputs = down.shape
    inner = _dot(x, down.reshape(adapters * rank, inputs).T).reshape(len(x), adapters, rank)
    inner = jnp.where((place[:, None] == jnp.arange(adapters))[:, :, None], inner, 0)
    return _dot(inner.reshape(len(x), adapters * rank), up.reshape(adapters * rank, -1))


def low_rank_reference(
    x: Float[Array, "rows inputs"],
    down: Float[Array, "adapters rank inputs"],
    up: Float[Array, "adapters rank outputs"],
    place: Int[Array, " rows"],
) -> Float[Array, "rows outputs"]:
    """Compute the same row by row, as the reference of the other versions."""
    some = jnp.maximum(place, 0)
    inner = jnp.einsum("ti,tri->tr", x, down[some], precision=jax.lax.Precision.HIGHEST)
    out = jnp.einsum("tr,tro->to", inner, up[some], precision=jax.lax.Precision.HIGHEST)
    return jnp.where((place >= 0)[:, None], out, 0)


def _dot(x: Array, matrix: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, matrix, precision=precision, preferred_element_type=x.dtype)

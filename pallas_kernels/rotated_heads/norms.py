"""Describes the norms that heads have before they are rotated."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.stacked_row import StackedRow, vector_of


class HeadNorms(NamedTuple):
    """Root-mean-square norms over head_dim, one of each head's queries and one of its keys (Qwen3, Gemma 3).

    A head is rounded to its dtype between norm and rotation, as `pallas_kernels.row_ops.rms_norm` rounds.

    Attributes:
        q, k: what normed lanes are multiplied by, less `offset`.
        eps: is added to the mean of squares.
        offset: see `pallas_kernels.row_ops.rms_norm`.
    """

    q: Float[Array, " head_dim"] | StackedRow
    k: Float[Array, " head_dim"] | StackedRow
    eps: float
    offset: float = 0.0

    @property
    def factors(self) -> Float[Array, "2 head_dim"]:
        """Return what queries and keys are multiplied by, float32."""
        return self.offset + jnp.stack([vector_of(self.q), vector_of(self.k)]).astype(jnp.float32)

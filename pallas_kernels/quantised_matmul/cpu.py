"""Multiplies with quantised matrices of experts on a CPU; dequantises only the experts that have rows.

Products with one matrix use `reference`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised import QuantisedMatrix
from pallas_kernels.quantised_matmul.reference import quantised_matmul, quantised_matmul_table

__all__ = ["quantised_matmul", "quantised_matmul_grouped", "quantised_matmul_table"]

_FEW, _MANY = 8, 64
"""Rows that one dequantised matrix multiplies: where experts have few each, and where they have many."""


def quantised_matmul_grouped(
    x: Float[Array, "rows inputs"], table: QuantisedMatrix, counts: Int[Array, " experts"]
) -> Float[Array, "rows outputs"]:
    """See `pallas_kernels.quantised_matmul.quantised_matmul_grouped`.

    Rows are cut into tiles of one expert each. A loop over the tiles, with a dynamic count, dequantises the expert's
    matrix and multiplies. Rows of a tile after its expert's last are overwritten by the next tile.
    """
    rows, experts = len(x), len(counts)
    tile = min(rows, _FEW if rows <= _FEW * experts else _MANY)
    tiles = -(-counts // tile)
    last_tile, last_row = jnp.cumsum(tiles), jnp.cumsum(counts)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    # Turn `number` finds its expert by the cumulative numbers of tiles, and its rows by those of rows.
    def multiply(number: Array, out: Array) -> Array:
        expert = jnp.searchsorted(last_tile, number, side="right")
        end = last_row[expert]
        start = end - counts[expert] + (number - (last_tile[expert] - tiles[expert])) * tile
        matrix = jax.tree.map(lambda part: jax.lax.dynamic_index_in_dim(part, expert, 0, keepdims=False), table)
        own = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        product = jnp.dot(own, matrix.dequantised(x.dtype), precision=precision, preferred_element_type=x.dtype)
        is_own = start + jnp.arange(tile) < end
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(is_own[:, None], product, 0), start, 0)

    out = jnp.zeros((rows + tile, table.shape[-1]), x.dtype)
    return jax.lax.fori_loop(0, last_tile[-1], multiply, out)[:rows]

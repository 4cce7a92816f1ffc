"""Multiplies rows with a weight in any form: an array, or one of the classes in `PRODUCTS`.

`PRODUCTS` is the only table from a holder's class to its products; a new class is one entry. Operands may be a shard's
own arrays, inside `jax.shard_map`. The loops of ``impl="cpu"`` are custom calls, which need unsharded operands; with
any other `impl` XLA may partition a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.bfloat16_matmul import bfloat16_matmul, bfloat16_matmul_grouped
from pallas_kernels.held_matrix import HeldMatrix, PermutedMatrix
from pallas_kernels.matmul import chosen_product, matmul, matmul_grouped, matmul_table
from pallas_kernels.matmul.cpu import matmul_panels
from pallas_kernels.panelled_floats import PanelledFloats
from pallas_kernels.platform import Impl, resolve_impl
from pallas_kernels.quantised import QuantisedMatrix
from pallas_kernels.quantised_matmul import quantised_matmul, quantised_matmul_grouped, quantised_matmul_table
from pallas_kernels.tiled import TiledMatrix
from pallas_kernels.tiled_floats import TiledFloats
from pallas_kernels.tiled_matmul import tiled_matmul, tiled_matmul_grouped

__all__ = ["PRODUCTS", "Products", "Weight", "multiply", "multiply_grouped", "multiply_table"]

Weight = Array | HeldMatrix


class How(NamedTuple):
    """Says how a product is wanted, apart from its operands.

    Attributes:
        rows: how many rows of x, the first ones, are wanted; the others may give 0. None: all.
        dtype: of the result.
        input_shards: shards over which XLA has split the contracted axis.
        impl: which version multiplies, see `pallas_kernels.platform.Impl`.
    """

    rows: Int[Array, ""] | None
    dtype: jnp.dtype
    input_shards: int
    impl: Impl


class Products(NamedTuple):
    """Holds the three products of one kind of weight.

    Attributes:
        matrix: (x, matrices, index, how) -> ``x @ matrices[index]``.
        table: (x, table, how) -> ``x @ table.T`` in float32.
        grouped: (x, table, counts, how) -> each row times its expert's matrix.
    """

    matrix: Callable[[Array, Sequence[Any], int | Array, How], Array]
    table: Callable[[Array, Any, How], Array]
    grouped: Callable[[Array, Any, Array, How], Array]


def multiply(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[Weight],
    index: int | Int[Array, ""] = 0,
    *,
    rows: Int[Array, ""] | None = None,
    out_dtype: jnp.dtype | None = None,
    input_shards: int = 1,
    impl: Impl | None = None,
) -> Float[Array, "rows outputs"]:
    """Return ``x @ matrices[index]``; only that matrix is read.

    Args:
        matrices: [inputs, outputs] each. Where they are not all alike, a branch is taken to those that are. A class may
            round the numbers of x, see `QuantisedMatrix.rounds_rows` and `TiledFloats.product`.
        index: may be traced.
        rows, input_shards: see `How`.
        out_dtype: the result's dtype; None = that of `x`.
        impl: None picks by platform. ``gpu`` and ``cpu`` need unsharded operands.
    """
    how = How(rows, jnp.dtype(out_dtype or x.dtype), input_shards, resolve_impl(impl))
    forms = [_form_of(matrix) for matrix in matrices]
    kinds = list(dict.fromkeys(forms))
    if len(kinds) == 1:
        return products_of(matrices[0]).matrix(x, matrices, index, how)
    of_kind = [[matrix for matrix, form in zip(matrices, forms, strict=True) if form == kind] for kind in kinds]
    kind = np.array([kinds.index(form) for form in forms], np.int32)
    place = np.array([forms[:number].count(form) for number, form in enumerate(forms)], np.int32)

    def multiply_kind(alike: Sequence[Weight]) -> Callable[[Array, int | Array], Array]:
        return lambda x, place: products_of(alike[0]).matrix(x, alike, place, how)

    if isinstance(index, int):
        return multiply_kind(of_kind[kind[index]])(x, int(place[index]))
    return jax.lax.switch(jnp.asarray(kind)[index], list(map(multiply_kind, of_kind)), x, jnp.asarray(place)[index])


def _form_of(matrix: Weight) -> Any:
    """Return what is alike in matrices that one call takes: all but their numbers."""
    parts, structure = jax.tree.flatten(matrix)
    return structure, tuple((part.shape, part.dtype) for part in parts)


def multiply_table(
    x: Float[Array, "rows embed"],
    table: Weight,
    *,
    rows: Int[Array, ""] | None = None,
    impl: Impl | None = None,
) -> Float[Array, "rows vocab"]:
    """Return ``x @ table.T`` in float32; `table` is [vocab, embed]. See `multiply`."""
    how = How(rows, jnp.dtype(jnp.float32), 1, resolve_impl(impl))
    return products_of(table).table(x, table, how)


def multiply_grouped(
    x: Float[Array, "rows inputs"], table: Weight, counts: Int[Array, " experts"], *, impl: Impl | None = None
) -> Float[Array, "rows outputs"]:
    """Return each row's product with its expert's matrix, in the dtype of `x`; rows of no expert give 0.

    Args:
        x: sorted by expert: the first ``counts[0]`` rows are expert 0's.
        table: [experts, inputs, outputs].
        impl: see `multiply`.

    Raises:
        ValueError: the shapes do not fit: a CPU's loops would read beyond an array.
    """
    experts, inputs, _ = table.shape
    if x.shape[1:] != (inputs,) or counts.shape != (experts,):
        said = f"x {list(x.shape)} and counts {list(counts.shape)}"
        raise ValueError(f"{said} do not fit a table of {experts} experts' matrices of {inputs} inputs")
    return products_of(table).grouped(x, table, counts, How(None, x.dtype, 1, resolve_impl(impl)))


def products_of(weight: Weight) -> Products:
    """Return the products of a weight's class; arrays, traced or not, have those of floats."""
    return PRODUCTS.get(type(weight), _FLOATS)


# ------------------------------------------------------------------ arrays

_FLOATS = Products(
    matrix=lambda x, matrices, index, how: matmul(
        x, matrices, index, rows=how.rows, out_dtype=how.dtype, impl=how.impl
    ),
    table=lambda x, table, how: matmul_table(x, table, rows=how.rows, impl=how.impl),
    grouped=lambda x, table, counts, how: matmul_grouped(x, table, counts, impl=how.impl),
)

# ------------------------------------------------------------------ codes

_CODES = Products(
    matrix=lambda x, matrices, index, how: quantised_matmul(
        x, matrices, index, out_dtype=how.dtype, input_shards=how.input_shards, impl=how.impl
    ),
    table=lambda x, table, how: quantised_matmul_table(x, table, impl=how.impl),
    grouped=lambda x, table, counts, how: quantised_matmul_grouped(x, table, counts, impl=how.impl),
)


def _by_tiles(x: Array, matrices: Sequence[TiledMatrix], index: int | Array, how: How) -> Array:
    if how.impl == "cpu":
        return tiled_matmul(x, matrices, index, rows=how.rows).astype(how.dtype)
    return chosen_product(lambda x, m: _CODES.matrix(x, [m.untiled()], 0, how), x, matrices, index)


def _by_tiles_of_table(x: Array, table: TiledMatrix, how: How) -> Array:
    if how.impl == "cpu":
        return tiled_matmul(x, [table], rows=how.rows)
    return _CODES.table(x, table.untiled(), how)


def _by_tiles_of_experts(x: Array, table: TiledMatrix, counts: Array, how: How) -> Array:
    if how.impl == "cpu":
        return tiled_matmul_grouped(x, table, counts).astype(x.dtype)
    return _CODES.grouped(x, table.untiled(), counts, how)


_TILES = Products(_by_tiles, _by_tiles_of_table, _by_tiles_of_experts)

# ------------------------------------------------------------------ floats in another layout


def _as_arrays(x: Array, matrices: Sequence[HeldMatrix], index: int | Array, how: How) -> Array:
    """Multiply with the array that a matrix stands for: where no loop reads its layout."""
    return chosen_product(lambda x, m: matmul(x, [m.dequantised(x.dtype)], out_dtype=how.dtype), x, matrices, index)


def _table_as_array(x: Array, table: HeldMatrix, how: How) -> Array:
    return matmul_table(x, table.dequantised(x.dtype))


def _grouped_as_arrays(x: Array, table: HeldMatrix, counts: Array, how: How) -> Array:
    return matmul_grouped(x, table.dequantised(x.dtype), counts)


def _by_float_tiles(x: Array, matrices: Sequence[TiledFloats], index: int | Array, how: How) -> Array:
    if how.impl == "cpu":
        return bfloat16_matmul(x, matrices, index, rows=how.rows).astype(how.dtype)
    return _as_arrays(x, matrices, index, how)


def _by_float_tiles_of_table(x: Array, table: TiledFloats, how: How) -> Array:
    return bfloat16_matmul(x, [table], rows=how.rows) if how.impl == "cpu" else _table_as_array(x, table, how)


def _by_float_tiles_of_experts(x: Array, table: TiledFloats, counts: Array, how: How) -> Array:
    if how.impl == "cpu":
        return bfloat16_matmul_grouped(x, table, counts).astype(x.dtype)
    return _grouped_as_arrays(x, table, counts, how)


def _by_panels(x: Array, matrices: Sequence[PanelledFloats], index: int | Array, how: How) -> Array:
    if how.impl == "cpu":
        return matmul_panels(x, matrices, index, how.rows).astype(how.dtype)
    return _as_arrays(x, matrices, index, how)


# ------------------------------------------------------------------ inputs in another order


def _permuted(x: Array, matrices: Sequence[PermutedMatrix], index: int | Array, how: How) -> Array:
    # The rows are arranged in a branch for each layer, and the product chooses among all layers' matrices as it would
    # without an order: a CPU's products read them where they lie.
    arranged = chosen_product(lambda x, m: m.arranged(x), x, matrices, index)
    inner = [matrix.matrix for matrix in matrices]
    return products_of(inner[0]).matrix(arranged, inner, index, how)


def _permuted_table(x: Array, table: PermutedMatrix, how: How) -> Array:
    return products_of(table.matrix).table(table.arranged(x), table.matrix, how)


def _permuted_experts(x: Array, table: PermutedMatrix, counts: Array, how: How) -> Array:
    expert = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(len(x)), side="right")
    order = jnp.take(table.order, expert, axis=0, mode="clip")  # of each row; some row of no expert
    return products_of(table.matrix).grouped(jnp.take_along_axis(x, order, axis=1), table.matrix, counts, how)


PRODUCTS: dict[type, Products] = {
    jax.Array: _FLOATS,
    QuantisedMatrix: _CODES,
    TiledMatrix: _TILES,
    TiledFloats: Products(_by_float_tiles, _by_float_tiles_of_table, _by_float_tiles_of_experts),
    PanelledFloats: Products(_by_panels, _table_as_array, _grouped_as_arrays),
    PermutedMatrix: Products(_permuted, _permuted_table, _permuted_experts),
}

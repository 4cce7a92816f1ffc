"""Plans the TPU kernel's launch from the batch alone: what is the same for all layers is computed once a step.

Every small operation before a launch costs a TPU about two thousand cycles whatever it does, so a loop over layers
should hold none that does not need the layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.kv_codes import check_tpu_view, has_scales, tokens_of
from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.reach import Reach
from pallas_kernels.paged_attention.tpu_units import Units, check_tables, cut_into_units, max_units, unit_of_token

MAX_ROWS = 128
"""Query rows of one matrix product."""
TABLE_BYTES = 768 * 2**10
"""Largest block tables: they lie in scalar memory, 1 MiB on a TPU v5e."""


class Gathers(NamedTuple):
    """Says where the queries of a batch with prompts lie among those of its units.

    Attributes:
        rows: batch row of each query of each unit; what is behind the unit's last query is any row.
        unit, place: the unit of each batch row, and its place in it.
        live: whether a batch row is a sequence's.
    """

    rows: Int[Array, "units tile"]
    unit: Int[Array, " tokens"]
    place: Int[Array, " tokens"]
    live: Bool[Array, " tokens"]


class Plan(NamedTuple):
    """Holds what the kernel needs of a batch.

    Attributes:
        units: the work list.
        tables: row of the view, as blocks and layers together, that holds each page's first layer; -1 for no block.
        gathers: None where every unit is one batch row, in the batch's order.
        last_keys: last key that each query of each unit sees, in lane ``query``; None = its own.
    """

    units: Units
    tables: Int[Array, " entries"]
    gathers: Gathers | None
    last_keys: Int[Array, "units 1 128"] | None = None


def make_plan(
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    view: Any,
    *,
    tokens: int,
    q_per_kv: int,
    reach: Reach,
    max_query_len: int | None,
    last_keys: Int[Array, " tokens"] | None = None,
) -> Plan:
    """Return the plan of a batch of `tokens` rows; it serves all layers of `view`, of which shape and dtype are read.

    Args:
        last_keys: last key that each row of the batch sees; None = its own, as in a batch of single queries anyway.

    Raises:
        ValueError: when the view's block size is not a multiple of its dtype's sublane tile, an int8 view is not as
            TPUs hold it, or the block tables do not fit in scalar memory.
    """
    check_tpu_view(view)
    blocks, layers = view.shape[:2]
    block_size = tokens_of(view)
    seqs, pages = block_tables.shape
    if 4 * seqs * pages > TABLE_BYTES:
        raise ValueError(
            f"block tables of {seqs} x {pages} ids take {4 * seqs * pages} bytes, more than {TABLE_BYTES}: "
            f"use larger blocks than {block_size} tokens, or fewer sequences"
        )
    tile = tile_of_batch(tokens, max_query_len, q_per_kv, view.dtype)
    units = tokens if max_query_len == 1 else max_units(tokens, seqs, tile, max_query_len)
    tables, broken = check_tables(block_tables, query_starts, kv_lens, blocks, block_size, reach)
    behind = None if max_query_len == 1 or last_keys is None else last_keys.astype(jnp.int32)
    work, first_row = cut_into_units(
        query_starts,
        kv_lens,
        broken,
        tile=tile,
        units=units,
        reach=reach,
        pages=pages,
        block_size=block_size,
        last_keys=behind,
    )
    gathers = last = None
    if max_query_len != 1:
        unit, place = unit_of_token(query_starts, tokens, tile)
        rows = jnp.minimum(first_row[:, None] + jnp.arange(tile), tokens - 1)
        gathers = Gathers(rows, jnp.minimum(unit, units - 1), place, jnp.arange(tokens) < query_starts[-1])
        last = None if behind is None else jnp.pad(behind[rows], ((0, 0), (0, LANES - tile)))[:, None]
    return Plan(work, jnp.where(tables < 0, -1, tables * layers).reshape(-1), gathers, last)


def tile_of_batch(tokens: int, max_query_len: int | None, q_per_kv: int, dtype: jnp.dtype) -> int:
    """Return how many queries of one sequence are multiplied at once: a power of two, so that a row's query is its low
    bits.

    Args:
        tokens: rows of the batch.
        max_query_len: most queries of a sequence, where it is known.
        q_per_kv: query heads of a KV head.
        dtype: dtype of the view.
    """
    longest = min(tokens, max_query_len or tokens)
    tile = 1
    while 2 * tile * q_per_kv * copies_of(dtype) <= MAX_ROWS and tile < longest:
        tile *= 2
    return tile


def copies_of(dtype: jnp.dtype) -> int:
    """Return how many rows a query takes, see `tpu_codes`."""
    return 2 if has_scales(dtype) else 1

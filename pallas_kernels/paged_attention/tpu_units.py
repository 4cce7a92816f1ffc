"""Makes the TPU kernel's work list: which queries and which pages each grid step takes.

A *unit* is up to `tile` consecutive queries of one sequence. All of a unit's keys lie in one range of logical
pages, so it needs no others: pages behind its window or chunk or past its last query are never touched.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.paged_attention.reach import Reach


class Units(NamedTuple):
    """Lists the units, live ones first; `num_units` of them are live. Positions are token positions within the
    sequence."""

    num_units: Int[Array, " 1"]
    entry: Int[Array, " units"]
    """Index of the first page in the flattened block tables."""
    num_pages: Int[Array, " units"]
    """Pages that hold a key some query sees."""
    first_key: Int[Array, " units"]
    """Position of the first page's first key, seen or not."""
    query_pos: Int[Array, " units"]
    """Position of the first query."""
    key_start: Int[Array, " units"]
    """First key any query sees."""
    key_stop: Int[Array, " units"]
    """One past the last key any query sees."""
    broken: Int[Array, " units"]
    """1 if a page that some query of the sequence sees has no block."""


def max_units(tokens: int, seqs: int, tile: int, max_query_len: int | None) -> int:
    """Return the most units a batch of this shape can need."""
    bound = min(tokens, seqs + tokens // tile)
    return bound if max_query_len is None else min(bound, seqs * -(-max_query_len // tile))


def cut_into_units(
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    broken: Int[Array, " seqs"],
    *,
    tile: int,
    units: int,
    reach: Reach,
    pages: int,
    block_size: int,
    last_keys: Int[Array, " tokens"] | None = None,
) -> tuple[Units, Int[Array, " units"]]:
    """Cut the batch into units; returns the work list, and the batch row of each unit's first query.

    Args:
        pages: width of the block tables.
        last_keys: last key that each row of the batch sees; None = its own.
    """
    lengths = jnp.diff(query_starts)
    tiles = (lengths + tile - 1) // tile
    ends = jnp.cumsum(tiles)
    unit = jnp.arange(units, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(unit[:, None] >= ends, axis=1), len(kv_lens) - 1)
    offset = (unit - (ends - tiles)[seq]) * tile
    query_pos = (kv_lens - lengths)[seq] + offset
    # At most the query itself: the compiler would compute zeros, which it knows, in each layer anew.
    key_start = jnp.minimum(reach.first_key(query_pos), query_pos)
    first_row, key_stop = query_starts[seq] + offset, query_pos + tile
    if last_keys is not None:
        place = jnp.arange(tile)
        last = last_keys[jnp.minimum(first_row[:, None] + place, len(last_keys) - 1)]
        mine = place < (lengths[seq] - offset)[:, None]
        key_stop = jnp.maximum(key_stop, jnp.max(jnp.where(mine, last, 0), axis=1) + 1)
    key_stop = jnp.minimum(key_stop, jnp.minimum(kv_lens[seq], pages * block_size))
    first_page = key_start // block_size
    num_pages = jnp.maximum((key_stop + block_size - 1) // block_size - first_page, 0)
    fields = (
        ends[-1:],
        seq * pages + first_page,
        num_pages,
        first_page * block_size,
        query_pos,
        key_start,
        key_stop,
        broken[seq],
    )
    return Units(*(x.astype(jnp.int32) for x in fields)), first_row


def unit_of_token(
    query_starts: Int[Array, " seqs+1"], tokens: int, tile: int
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Return (unit, place in it) of each batch row; rows from ``query_starts[-1]`` on get some unit."""
    lengths = jnp.diff(query_starts)
    first = jnp.cumsum((lengths + tile - 1) // tile) - (lengths + tile - 1) // tile
    token = jnp.arange(tokens, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(token[:, None] >= query_starts[1:], axis=1), lengths.shape[0] - 1)
    offset = jnp.maximum(token - query_starts[seq], 0)
    return first[seq] + offset // tile, offset % tile


def check_tables(
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    blocks: int,
    block_size: int,
    reach: Reach,
) -> tuple[Int[Array, "seqs pages"], Int[Array, " seqs"]]:
    """Return the tables with -1 for ids out of range, and whether a page that some query of the sequence sees has
    one."""
    known = (block_tables >= 0) & (block_tables < blocks)
    page = jnp.arange(block_tables.shape[1])
    first_key = reach.first_key(kv_lens - jnp.diff(query_starts))
    needed = (page >= (first_key // block_size)[:, None]) & (page * block_size < kv_lens[:, None])
    tables = jnp.where(known, block_tables, -1).astype(jnp.int32)
    return tables, jnp.any(needed & ~known, axis=1).astype(jnp.int32)

"""The GPU kernels' work lists, computed on the device from the batch's lengths."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.paged_attention.reach import Reach


class DecodeUnits(NamedTuple):
    """Ranges of keys of the sequences that have one query token."""

    seq: Int[Array, " units"]
    key: Int[Array, " units"]
    """Position of a unit's first key, a multiple of the unit's length: a sequence is cut alike in every batch."""
    num_units: Int[Array, " 1"]
    seq_units: Int[Array, " seqs+1"]
    """Units ``seq_units[s]:seq_units[s+1]`` are sequence s's."""


class PrefillTiles(NamedTuple):
    """Runs of queries of the sequences that have several query tokens."""

    seq: Int[Array, " tiles"]
    query: Int[Array, " tiles"]
    """A tile's first query, counted from its sequence's first."""
    num_tiles: Int[Array, " 1"]


def decode_units(
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    *,
    unit: int,
    units: int,
    capacity: int,
    reach: Reach,
) -> DecodeUnits:
    """Cut each decode's visible keys into ranges of `unit`. `capacity`: tokens that a block table can name."""
    first = reach.first_key(kv_lens - 1) // unit
    counts = (jnp.minimum(kv_lens, capacity) + unit - 1) // unit - first
    counts = jnp.where(jnp.diff(query_starts) == 1, jnp.maximum(counts, 0), 0)
    ends = jnp.cumsum(counts)
    index = jnp.arange(units)
    seq = _owner(index, ends)
    key = (first[seq] + index - (ends - counts)[seq]) * unit
    return DecodeUnits(*_int32(seq, key, ends[-1:], jnp.concatenate([jnp.zeros_like(ends[:1]), ends])))


def prefill_tiles(query_starts: Int[Array, " seqs+1"], *, tile: int, tiles: int) -> PrefillTiles:
    """Cut the queries of each sequence that has several into runs of `tile`."""
    lengths = jnp.diff(query_starts)
    counts = jnp.where(lengths > 1, (lengths + tile - 1) // tile, 0)
    ends = jnp.cumsum(counts)
    index = jnp.arange(tiles)
    seq = _owner(index, ends)
    return PrefillTiles(*_int32(seq, (index - (ends - counts)[seq]) * tile, ends[-1:]))


def _owner(index: Int[Array, " n"], ends: Int[Array, " seqs"]) -> Int[Array, " n"]:
    return jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1), len(ends) - 1)


def _int32(*arrays: Array) -> tuple[Array, ...]:
    return tuple(array.astype(jnp.int32) for array in arrays)

"""Plans the TPU kernel's launches from the batch alone, so that values shared by all layers are computed once a step.

Every small operation before a launch costs a TPU about two thousand cycles whatever it does, so a loop over layers
should hold none that does not need the layer.

Sequences of one query, which decode, and prompts have separate launches. A decode is bound by reading KV: its
launch multiplies the query heads of one row and spreads the starts of its copies over the arithmetic. A prompt is bound
by arithmetic: its launch lets hundreds of rows share what is read.

`Tuning` has the sizes of the launches, by chip, KV heads and width of a head. Bytes in flight cover the latency of HBM,
about two microseconds: a chip that moves 819 GB/s needs 1.6 MB on their way, one that moves 3.7 TB/s needs 7.4 MB, and
as much again while a step is computed. The rows of a tile share the KV that is read: a key and its value are 4 bytes
for each of a head's lanes and give 4 operations a row, so a matrix unit keeps up with the memory from
``peak / bandwidth`` rows on: 240 on a v5e, 166 on a v5p, 560 on a v6e, 312 on a tpu7x. The next power of two leaves
room for tiles that a prompt does not fill. docs/tpu.md counts the rows of a product.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.kv_codes import check_tpu_view, has_scales, tokens_of
from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.reference import Reach
from pallas_kernels.paged_attention.tpu_ring import deepest_ring, fit_whole, table_width
from pallas_kernels.paged_attention.tpu_units import (
    ONE_ROW,
    Tile,
    check_tables,
    cut_into_units,
    max_units,
    visit_all_tiles,
)

_log = logging.getLogger(__name__)

MIB = 2**20


class Tuning(NamedTuple):
    """Holds the sizes of a launch; static.

    Attributes:
        flight_bytes: bytes of KV that VMEM has room for, computed or on their way.
        step_bytes: most bytes of KV of a step; the kernel waits for a whole step at once.
        step_keys: most keys of a step.
        product_rows: most query rows of a KV head in a product, and so of a sequence that decodes.
        tile_rows: most query rows of a KV head that share the KV that is read, in launches for prompts.
        decode_scores: most scores of a step of a sequence that decodes, where these allow longer steps than
            `step_bytes` and `step_keys`: a step is one chain of products, maximum and exponentials, which takes five
            hundred cycles whatever its length.
        pipelined_scores: most scores of a step of a decode whose steps are a pipeline, see `tpu_decode`: those of more
            have chains enough of their own, and no registers for three stages.
    """

    flight_bytes: int = 4 * MIB
    step_bytes: int = MIB
    step_keys: int = 1024
    product_rows: int = 128
    tile_rows: int = 512
    decode_scores: int = 2**16
    pipelined_scores: int = 0

    def for_decodes(self, rows: int, block_size: int) -> Tuning:
        """Return the sizes of a launch for decodes, of so many query rows of all heads of a step."""
        keys = min(_DECODE_KEYS, _DECODE_PAGES * block_size, self.decode_scores // rows)
        return self if keys < self.step_keys else self._replace(step_keys=keys, step_bytes=4 * MIB)


_DECODE_KEYS, _DECODE_PAGES = 4096, 64
"""Most keys of a step of a decode, and most pages of a longer one: the start of each page's DMA is compiled several
times, which with blocks of 16 and no limit added half of a step's time to compile."""

_BY_CHIP: Mapping[str, Tuning] = {
    "v5e": Tuning(),
    "v5p": Tuning(),
    "v6e": Tuning(flight_bytes=8 * MIB, tile_rows=1024),
    "tpu7x": Tuning(flight_bytes=16 * MIB, pipelined_scores=2**15),  # on others HBM takes as long as the chains
}
"""Sizes of launches with several KV heads."""

_FEW_HEADS_ROWS = 256
"""Rows of a product where a device has one or two KV heads: with 128 the latency of a product is not hidden."""

_KINDS = {"v5 lite": "v5e", "v5e": "v5e", "v5p": "v5p", "v5": "v5p", "v6 lite": "v6e", "v6e": "v6e", "7x": "tpu7x"}
"""Maps a part of a device's name to its chip; a longer part precedes any part that it contains."""

_TOO_SMALL = ("tpu v2", "tpu v3", "tpu v4")
"""Beginnings of names of devices whose VMEM, 16 MiB, holds neither the rings of attention nor those of `kv_write`."""


SIZES = Path(__file__).with_name("tpu_sizes.json")
"""Sizes that were simulated to take less time than the rules': by chip, `key_of` a shape and field of `Tuning`; and the
versions that compiled them. ``python -m scripts.compiled_code tune --write`` writes it."""


@cache
def read_sizes() -> dict[str, dict[str, Any]]:
    """Return the table in `SIZES`."""
    return json.loads(SIZES.read_text(encoding="utf-8"))


def key_of(kv_heads: int, q_per_kv: int, head_dim: int) -> str:
    """Return the table's key of a shape."""
    return f"{kv_heads} x {q_per_kv} x {head_dim}"


def tuning_of(device_kind: str, kv_heads: int, head_dim: int, q_per_kv: int | None = None) -> Tuning:
    """Return the sizes for a device, such as ``TPU v5 lite``. An unknown one gets those of a v5e, the smallest, so that
    models run; of a TPU that is logged once.

    Args:
        kv_heads: KV heads of one device.
        head_dim: width of a head.
        q_per_kv: query heads of a KV head, for sizes that were simulated; None = the rules'.

    Raises:
        ValueError: the device has less VMEM than the kernels need.
    """
    chip = _chip_or_least(device_kind)
    rules = rules_of(chip, kv_heads, head_dim)
    if q_per_kv is None:
        return rules
    return rules._replace(**read_sizes().get(chip, {}).get(key_of(kv_heads, q_per_kv, head_dim), {}))


def chip_of(device_kind: str) -> str:
    """Return the chip of a device such as ``TPU v5 lite``.

    Raises:
        ValueError: the kind is of no known chip.
    """
    for name, chip in _KINDS.items():
        if name in device_kind.lower():
            return chip
    known = ", ".join(_BY_CHIP)
    raise ValueError(f"device_kind={device_kind!r} names none of the TPUs that kernels have sizes for: {known}")


@cache
def _chip_or_least(device_kind: str) -> str:
    if device_kind.lower().startswith(_TOO_SMALL):
        raise ValueError(
            f"device_kind={device_kind!r} has 16 MiB of VMEM, less than the kernels need: they run from v5e on"
        )
    try:
        return chip_of(device_kind)
    except ValueError as error:
        if "tpu" in device_kind.lower():
            _log.warning("%s; attention runs with those of a v5e, which were never timed there", error)
        return "v5e"


def rules_of(chip: str, kv_heads: int, head_dim: int) -> Tuning:
    """Return the sizes for a chip as they follow from the shape."""
    tuning = _BY_CHIP[chip]
    if kv_heads <= 2:
        tuning = tuning._replace(product_rows=_FEW_HEADS_ROWS)
    if head_dim > 128:  # tiles, accumulators and results are as much wider
        tuning = tuning._replace(tile_rows=max(tuning.product_rows, tuning.tile_rows * 128 // head_dim))
    return tuning


def current_device_kind() -> str:
    """Return the kind of the target devices: those of the mesh in use, else this machine's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("tables", "decodes", "prompts", "of_decode", "of_prompt", "last_keys"),
    meta_fields=("tile", "tuning"),
)
@dataclass(frozen=True)
class Plan:
    """Holds the kernel's inputs that depend on the batch but not on the layer.

    Attributes:
        tables: row of the view, as blocks and layers together, that holds each page's first layer; -1 for no block.
            All entries in a row, or a table for each sequence where they do not fit in scalar memory together.
        decodes: the units of sequences of one query, see `tpu_units.Units`.
        prompts: those of the others; None where no sequence has more than one.
        of_decode, of_prompt: whether a row of the batch is of such a sequence; None where all rows may be decodes, or
            `side_by_side`.
        last_keys: last key that each row of the chunks of `prompts` sees, in lane ``place``; None = its own.
        tile: how `prompts` cuts the batch's rows.
        tuning: the sizes of the launches.
    """

    tables: Int[Array, " entries"] | Int[Array, "seqs 1 width"]
    decodes: Int[Array, "fields units"]
    prompts: Int[Array, "fields units"] | None
    of_decode: Bool[Array, " tokens"] | None
    of_prompt: Bool[Array, " tokens"] | None
    last_keys: Int[Array, "chunks 1 lanes"] | None
    tile: Tile
    tuning: Tuning

    @property
    def side_by_side(self) -> bool:
        """Tell whether the launches write a token's heads side by side, see `tpu_units`."""
        return self.prompts is not None and self.tile.fills_registers


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
    device_kind: str | None = None,
    tuning: Tuning | None = None,
) -> Plan:
    """Return the plan of a batch of `tokens` rows; it serves all layers of `view`, of which shape and dtype are read.

    Args:
        last_keys: last key that each row of the batch sees; None = its own, as in a batch of single queries anyway.
        device_kind: what JAX calls the devices; None = those of the mesh in use.
        tuning: sizes of the launches; None = those of `tuning_of` for the devices.

    Raises:
        ValueError: when the view's block size is not a multiple of its dtype's sublane tile, an int8 view is not as
            TPUs hold it, the devices have too little VMEM, or not even the block tables in use at once fit in scalar
            memory.
    """
    check_tpu_view(view)
    blocks, layers, kv_heads, tiles_of_head = view.shape[:4]
    if tuning is None:
        width = tiles_of_head * LANES // 2
        tuning = tuning_of(device_kind or current_device_kind(), kv_heads, width, q_per_kv)
    block_size = tokens_of(view)
    seqs, pages = block_tables.shape
    whole = fit_whole(seqs, pages)
    if not whole:
        deepest_ring(pages)
    tables, broken = check_tables(block_tables, query_starts, kv_lens, blocks, block_size, reach)
    tables = jnp.where(tables < 0, -1, tables * layers)
    tables = tables.reshape(-1) if whole else jnp.pad(tables, ((0, 0), (0, table_width(pages) - pages)))[:, None]
    cut = partial(
        cut_into_units,
        query_starts,
        kv_lens,
        broken,
        reach=reach,
        pages=pages,
        block_size=block_size,
        whole_tables=whole,
    )
    lengths = jnp.diff(query_starts)
    if max_query_len == 1:  # unit u is row u, so that the launch can write zeros for padding
        decodes = cut(lengths > 0, tile=1, tiles=tokens, units=tokens)
        return Plan(tables, decodes, None, None, None, None, ONE_ROW, tuning)
    decodes = cut(lengths == 1, tile=1, tiles=tokens, units=min(seqs, tokens))
    tile = tile_of_batch(tokens, max_query_len, q_per_kv, view.dtype, tuning)
    tiles = -(-tokens // tile.tokens)
    of_rows = last = None
    if last_keys is not None:
        of_rows = jnp.pad(last_keys.astype(jnp.int32), (0, tiles * tile.tokens - tokens))
        last = of_rows.reshape(-1, 1, tile.chunk)
        last = jnp.pad(last, ((0, 0), (0, 0), (0, -tile.chunk % LANES)))
    units = max_units(tokens, seqs, tile.tokens)
    prompts = cut(lengths > 1, tile=tile.tokens, tiles=tiles, units=units, last_keys=of_rows)
    if tile.fills_registers:  # a tile's first visit zeroes the rows of no prompt
        prompts = visit_all_tiles(prompts, tiles)
        return Plan(tables, decodes, prompts, None, None, last, tile, tuning)
    row = jnp.arange(tokens)
    seq = jnp.minimum(jnp.sum(row[:, None] >= query_starts[1:], axis=1), seqs - 1)
    live, decodes_here = row < query_starts[-1], lengths[seq] == 1
    return Plan(tables, decodes, prompts, live & decodes_here, live & ~decodes_here, last, tile, tuning)


def tile_of_batch(tokens: int, max_query_len: int | None, q_per_kv: int, dtype: Any, tuning: Tuning) -> Tile:
    """Return how a launch for prompts cuts the rows of a batch.

    Args:
        tokens: rows of the batch.
        max_query_len: most queries of a sequence, where it is known.
        q_per_kv: query heads of a KV head.
        dtype: dtype of the view.
        tuning: the most rows of a product and of a tile.
    """
    longest = min(tokens, max_query_len or tokens)
    rows = q_per_kv * copies_of(dtype)
    chunk = chunks = 1
    while 2 * chunk * rows <= tuning.product_rows and chunk < longest:
        chunk *= 2
    while 2 * chunks * chunk * rows <= tuning.tile_rows and chunks * chunk < longest:
        chunks *= 2
    return Tile(chunk, chunks)


def copies_of(dtype: Any) -> int:
    """Return how many rows a query takes, see `tpu_softmax`."""
    return 2 if has_scales(dtype) else 1

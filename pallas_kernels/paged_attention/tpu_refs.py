"""Names the memory that a body of the TPU kernel is given, in the order in which `tpu` passes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.tpu_new_rows import NewRows
from pallas_kernels.paged_attention.tpu_ring import TableWindows, WholeTables
from pallas_kernels.paged_attention.tpu_units import Units


class Refs(NamedTuple):
    """Holds the memory of a launch.

    Attributes:
        units: SMEM, the fields of `Units`.
        ids: the tables, in SMEM or HBM (see `tpu_ring`).
        q: VMEM, a block of queries [chunks or rows of the batch, heads, rows, lanes].
        view: HBM, the view of all layers: block n of layer l lies at row n * layers + l.
        layer: the launch's layer.
        rows: rows of the view from that of its first block on.
        first_head: the first of the view's heads that the launch reads.
        sinks: VMEM [heads, rows, 128], if there are any.
        last_keys: VMEM [chunks, 1, lanes], the last key that each query sees, if it may be another than its own.
        into: VMEM, the block of the prompts' result, where it is given.
        out: VMEM, the block of results.
        buffers, cursor, sems: scratch, see `Ring`.
        top, total, acc: scratch, see `OnlineSoftmax`.
        penalty: scratch, see `MissingBlocks`.
        own: scratch that one body alone has.
        new: the rows of the units' tokens that are not in the view yet; None = there are none.
    """

    units: Units
    ids: WholeTables | TableWindows
    q: Any
    view: Any
    layer: Any
    rows: int
    first_head: Any
    sinks: Sequence[Any]
    last_keys: Sequence[Any]
    into: Sequence[Any]
    out: Any
    buffers: Any
    top: Any
    total: Any
    acc: Any
    penalty: Any
    cursor: Any
    sems: Any
    own: Sequence[Any]
    new: NewRows | None


def named(
    refs: Sequence[Any],
    head_chunk: Any,
    *,
    layers: int,
    has_sinks: bool,
    has_last_keys: bool,
    has_into: bool,
    new_rows: int,
    num_own: int,
) -> Refs:
    """Return the memory of a launch by name.

    Args:
        refs: in their order: the layer [1] and the units in SMEM; tables; queries; view; sinks, last keys and the
            prompts' result, where there are any; `new_rows` arrays that `NewRows` merges; out, and with new rows the
            view again, which is written; scratch: the ring's buffers, the state of `OnlineSoftmax`, penalty, the ring's
            cursor and semaphores, `num_own` that one body alone has, the rest of `NewRows`, and the windows of
            `TableWindows`, if tables are in HBM.
        head_chunk: which chunk of heads.
        layers: those of the view, whose rows are blocks and layers together.
    """
    layer, work, tables, q, view, *more = refs
    heads = q.shape[1]
    sinks, more = more[:has_sinks], more[has_sinks:]
    last_keys, more = more[:has_last_keys], more[has_last_keys:]
    into, more = more[:has_into], more[has_into:]
    given, more = more[:new_rows], more[new_rows:]
    out, *more = more
    if given:
        view, *more = more  # the same memory, which is read where it was written
    buffers, top, total, acc, penalty, cursor, sems, *more = more
    own, more = more[:num_own], more[num_own:]
    sent, windows = more[: bool(given) * (2 + new_rows)], more[bool(given) * (2 + new_rows) :]
    units = Units.of(work)
    ids = TableWindows(units, tables, *windows) if windows else WholeTables(tables)
    first_head = head_chunk * heads
    new, rows = None, view.shape[0] - (layers - 1)
    if given:
        added, *words = given
        tiles, sems_sent, count, *scales = sent
        of_layer = view.at[pl.ds(layer[0], rows)]
        new = NewRows(of_layer, first_head, added, tiles, sems_sent, count, *words, *scales)
    return Refs(
        units, ids, q, view, layer[0], rows, first_head, sinks, last_keys, into, out,
        buffers, top, total, acc, penalty, cursor, sems, own, new,
    )  # fmt: skip

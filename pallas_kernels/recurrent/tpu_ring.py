"""Takes each decode's state through VMEM in pieces: the part that the TPU kernels of all recurrences share.

Memory. The pool stays in HBM, read and written by DMAs that the kernel starts itself. A *piece* is a run of rows of one
layer's state in one block, as many as its `Cell` says. One DMA brings it into a buffer of a ring in VMEM, [ring, rows,
128]; the cell updates it in the buffer; another DMA writes it to the block that takes the state. All operands of a
token are rows of one array, [tokens, rows, 128]. Pallas moves them and the outputs in blocks of some tokens,
`TURN_BYTES`: a DMA for each token would be waited for longer than a small state takes. Constants stay in VMEM for the
whole launch.

Loops. The grid has one turn per block of tokens, in order; a turn loops over its decodes, and over the pieces of their
states. Pieces of all decodes are numbered through, and piece n uses buffer ``n % ring``. While piece n is computed, up
to half of the ring is being read and the other half may still be written:

    take(n): wait for the read of n; update; start the write of n; wait for the write of n - ring / 2, which is the
             last user of the buffer of n + ring / 2; start the read of n + ring / 2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.recurrent.layout import LANES, StatePlace, Units

PIECE_BYTES = 512 * 1024
"""Most bytes of a piece, where a recurrence has no bound of its own."""
RING_BYTES = 8 * 2**20
"""VMEM of the ring. Half of it, 4 MiB, is being read, which is more than HBM delivers during the latency of a DMA."""
MIN_RING, MAX_RING = 4, 32
TURN_BYTES = 256 * 1024
"""Most bytes of operands of a turn's tokens, of which VMEM holds two turns."""
MOST_TURN = 8
"""Most tokens of a turn. The first turn begins when all of its operands are there."""


@dataclass(frozen=True)
class Cell:
    """A recurrence's part of the kernel: how a token updates its state, piece by piece.

    Attributes:
        update: ``update(piece, number, tokens, constants, out, scratch)`` updates the pieces' `Piece` in place, for
            piece `number` of a state, and adds to the token's row of `out`, ``[out_rows, 128]``, which is empty before
            piece 0. `tokens` and `constants` are refs: ``[rows, 128]`` of the token, and whole.
        begin: ``begin(tokens, out, scratch)`` runs before a token's first piece.
        tokens: arrays of the batch, ``[tokens, rows, 128]`` float32.
        constants: arrays that all tokens share, whole in VMEM.
        rows, pieces: rows of 128 elements of a piece, and pieces of a state.
        out_rows: rows of a token's output.
        skip: is added to the outputs of all tokens; None = nothing.
        scratch: shapes of float32 arrays in VMEM for the functions.
    """

    update: Callable[..., None]
    begin: Callable[..., None]
    tokens: tuple[Float[Array, "tokens rows 128"], ...]
    constants: tuple[Float[Array, ...], ...]
    rows: int
    pieces: int
    out_rows: int
    skip: Float[Array, "tokens ..."] | None = None
    scratch: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Piece:
    """Reads and writes rows of a state in a buffer that holds rows of the pool.

    Attributes:
        buffers: VMEM ``[ring, rows of the pool, 128]``.
        at: the buffer.
        dtype: of the state.
    """

    buffers: Any
    at: Any
    dtype: jnp.dtype

    @property
    def ratio(self) -> int:
        """Return how many rows of the pool hold one of the state."""
        return int(self.dtype.itemsize) // int(self.buffers.dtype.itemsize)

    def read(self, first: int, rows: int) -> Float[Array, "rows 128"]:
        """Return some rows in float32."""
        raw = self.buffers[self.at, pl.ds(first * self.ratio, rows * self.ratio)]
        own = raw if raw.dtype == self.dtype else pltpu.bitcast(raw, self.dtype)
        return own.astype(jnp.float32)

    def write(self, first: int, states: Float[Array, "rows 128"]) -> None:
        """Write some rows."""
        own, rows = states.astype(self.dtype), len(states) * self.ratio
        raw = own if own.dtype == self.buffers.dtype else pltpu.bitcast(own, self.buffers.dtype)
        self.buffers[self.at, pl.ds(first * self.ratio, rows)] = raw


def _kernel(layer, count, read, write, given, *refs, cell: Cell, place: StatePlace):
    """Update the states of this grid turn's decodes, piece by piece.

    SMEM: layer, count [1]; read, write [units].
    VMEM: given [turn, rows, 128], the operands of the turn's tokens; `cell.constants`; after the view, which is not
    used, and the view again, aliased: outputs [turn, out rows, 128]; buffers [ring, rows of the pool, 128];
    `cell.scratch`.
    sems [2, ring]: a piece's read, its write.
    """
    constants = refs[: len(cell.constants)]
    _view, view, outs, buffers, sems, *scratch = refs[len(cell.constants) :]
    ring, rows, _ = buffers.shape
    ahead, pieces, turn = ring // 2, cell.pieces, len(given)
    first, total = pl.program_id(0) * turn, count[0] * pieces

    # `number` counts the pieces of all decodes. A negative block means no read (a new state) or no write.
    def copy(number, outward):
        block = (write if outward else read)[lax.div(number, pieces)]
        slot = lax.rem(number, ring)
        rows_of_piece = pl.ds(place.row + lax.rem(number, pieces) * rows, rows)
        ends = view.at[block, layer[0], rows_of_piece], buffers.at[slot]
        ends = ends[::-1] if outward else ends
        return block >= 0, pltpu.make_async_copy(*ends, sems.at[int(outward), slot])

    def start(number, outward):
        there, dma = copy(number, outward)
        pl.when(there)(dma.start)

    def wait(number, outward):
        there, dma = copy(number, outward)
        pl.when(there)(dma.wait)
        return there

    def fetch(number):
        """Start to read a piece as soon as its buffer is free."""

        @pl.when(number < total)
        def start_when_free():
            # The buffer's last piece, `ring` before, was computed half a ring ago; its write may still be running.
            @pl.when(number >= ring)
            def after_the_last_write():
                wait(number - ring, True)

            start(number, False)

    def take(unit, number, tokens, out):
        piece = unit * pieces + number
        slot = lax.rem(piece, ring)

        @pl.when(~wait(piece, False))
        def begin_from_nothing():
            buffers[slot] = jnp.zeros((rows, LANES), buffers.dtype)

        cell.update(Piece(buffers, slot, place.dtype), number, tokens, constants, out, scratch)
        start(piece, True)
        fetch(piece + ahead)

    @pl.when(first == 0)
    def fill_the_ring():
        pl.loop(0, ahead)(fetch)

    @pl.loop(0, jnp.minimum(turn, count[0] - first))
    def take_all_pieces(nth):
        tokens, out = _parts(given.at[nth], cell), outs.at[nth]
        cell.begin(tokens, out, scratch)
        if pieces == 1:
            take(first + nth, 0, tokens, out)
        else:
            pl.loop(0, pieces)(lambda number: take(first + nth, number, tokens, out))

    @pl.when(first + turn >= count[0])
    def drain_the_ring():
        @pl.loop(jnp.maximum(total - ring, 0), total)
        def wait_for_write(number):
            wait(number, True)


def _parts(given: Any, cell: Cell) -> tuple[Any, ...]:
    """Return the refs of each operand of a token, of which `given` holds all rows."""
    rows = [operand.shape[1] for operand in cell.tokens]
    return tuple(given.at[pl.ds(end - own, own)] for end, own in zip(accumulate(rows), rows, strict=True))


def decode(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    place: StatePlace,
    units: Units,
    cell: Cell,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Shaped[Array, "blocks layers rows 128"], Float[Array, "decodes rows 128"]]:
    """Return the view, aliased, with the decodes' new states, and each decode's output; other rows may be anything."""
    decodes = min(len(cell.tokens[0]), len(units.read))
    rows = cell.rows * place.dtype.itemsize // view.dtype.itemsize
    piece_bytes = rows * LANES * view.dtype.itemsize
    ring = max(MIN_RING, min(MAX_RING, RING_BYTES // piece_bytes))

    given = jnp.concatenate(cell.tokens, axis=1)
    turn = max(1, min(MOST_TURN, decodes, TURN_BYTES // (given.shape[1] * LANES * 4)))

    def of_turn(nth, *_):
        return nth, 0, 0

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    # `partial` keeps each constant's own number of axes.
    whole = [pl.BlockSpec(array.shape, partial(_first, array.ndim)) for array in cell.constants]
    scalars = (jnp.asarray(layer, jnp.int32)[None], units.num_decodes[None], units.read, units.write)
    view, out = pl.pallas_call(
        partial(_kernel, cell=cell, place=place),
        out_shape=(
            jax.ShapeDtypeStruct(view.shape, view.dtype),
            jax.ShapeDtypeStruct((decodes, cell.out_rows, LANES), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            # Dynamic, as each turn costs its start even without a decode.
            grid=(pl.cdiv(jnp.maximum(units.num_decodes, 1), turn),),
            in_specs=[pl.BlockSpec((turn, *given.shape[1:]), of_turn), *whole, in_hbm],
            out_specs=[in_hbm, pl.BlockSpec((turn, cell.out_rows, LANES), of_turn)],
            scratch_shapes=[
                pltpu.VMEM((ring, rows, LANES), view.dtype),
                pltpu.SemaphoreType.DMA((2, ring)),
                *(pltpu.VMEM(shape, jnp.float32) for shape in cell.scratch),
            ],
        ),
        input_output_aliases={len(scalars) + 1 + len(cell.constants): 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name="recurrent_decode",
    )(*scalars, given, *cell.constants, view)
    return view, out


def _first(axes: int, *_: Any) -> tuple[int, ...]:
    return (0,) * axes

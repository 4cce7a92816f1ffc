"""Runs recurrences on CPUs: loops that update states where they lie in the pool, compiled by Numba, called by XLA.

XLA:CPU makes several passes over a state where these loops make one, and some of its sums read memory across rows.
There is one custom call for decodes and one for the other units of a batch. XLA's threads share their items of work; an
item is a tile of a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.cpu_features import LANES
from pallas_kernels.custom_calls import target
from pallas_kernels.recurrent.layout import StatePlace, Units
from pallas_kernels.recurrent.recurrence import Recurrence

DECODE_LANES, UNIT_LANES = 1024, 256
"""Most columns of a tile, unless a head or group of heads ends it earlier: of a decode, which should read long rows,
and of other units, whose tile should stay in the first-level cache."""
CONV_LANES = 1024
"""`UNIT_LANES` of a convolution, whose state is small and which mostly reads inputs."""


_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tiles:
    """Describes how a state is cut into tiles, and the operands of one kernel's loops.

    Attributes:
        kernel: suffix of the name of the loops' module.
        operands: arrays of tokens, then constants, as that module says.
        shape: ``[rows, columns]`` of the state or, with `apart`, of each of its heads; it is cut by columns.
        apart: number of heads that follow one another in memory, each a tile; 1 = none.
        cuts: the columns of a tile divide this number; 0 = all columns.
        least: the columns of a tile are a multiple of this number.
        has_piece: whether the kernel computes a unit at once, not only token by token.
        unit_lanes: most columns of a unit's tile.
    """

    kernel: str
    operands: tuple[Array, ...]
    shape: tuple[int, int]
    apart: int = 1
    cuts: int = 0
    least: int = 1
    has_piece: bool = False
    unit_lanes: int = UNIT_LANES

    def width(self, most: int) -> int:
        """Return the columns of a tile: the largest equal part that is at most `most`, or `least`."""
        pieces = (self.cuts or self.shape[1]) // self.least
        return self.least * max(
            n for n in range(1, pieces + 1) if pieces % n == 0 and n * self.least <= max(most, self.least)
        )


def takes(view: Shaped[Array, "blocks layers rows 128"], place: StatePlace) -> bool:
    """Tell whether `run` takes them: pool and state are float32."""
    return view.dtype == jnp.float32 and place.dtype == jnp.float32


def conv(place: StatePlace, x: Array, weight: Array, bias: Array | None, activation: str | None) -> Tiles:
    """Describe `pallas_kernels.recurrent.causal_conv` to `run`."""
    taps, channels = place.shape
    offset = jnp.zeros((1, channels)) if bias is None else bias[None]
    silu = jnp.full((1, 1), activation == "silu")
    return Tiles("conv", _wide(x, weight.T, offset, silu), (taps, channels), has_piece=True, unit_lanes=CONV_LANES)


def scan(place: StatePlace, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array) -> Tiles:
    """Describe `pallas_kernels.recurrent.selective_scan` to `run`."""
    n, channels = place.shape
    least = LANES if channels % LANES == 0 else 1
    return Tiles("scan", _wide(x, dt, b, c, a.T * _LOG2E, d[None]), (n, channels), least=least, has_piece=True)


def ssd(place: StatePlace, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array) -> Tiles:
    """Describe `pallas_kernels.recurrent.ssd` to `run`."""
    n, groups, heads, width = place.shape  # heads of each group
    vectors = width % LANES == 0 and n % LANES == 0
    operands = _wide(x, dt, b, c, a[None], d[None])
    return Tiles("ssd", operands, (n, groups * heads * width), 1, heads * width, width, vectors)


def delta(place: StatePlace, q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> Tiles:
    """Describe `pallas_kernels.recurrent.gated_delta` to `run`."""
    heads, size, width = place.shape
    vectors = width % LANES == 0 and size % LANES == 0
    return Tiles("delta", _wide(q, k, v, log_decay, beta), (size, width), heads, least=width, has_piece=vectors)


def run(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    units: Units,
    what: Recurrence,
    tiles: Tiles,
) -> tuple[Shaped[Array, "blocks layers rows 128"], Shaped[Array, "tokens ..."]]:
    """Return the view and every token's output, 0 for tokens of no unit."""
    of_decodes, of_units = target(f"recurrent.cpu_{tiles.kernel}:targets")
    y: Any = None
    in_order = units.most == 1 and not units.decodes_only
    first = 0 if in_order else units.num_decodes
    if not in_order:
        view, y = _call(of_decodes, view, layer, what, units, tiles, y, 0, units.num_decodes, DECODE_LANES, True)
    if not units.decodes_only:
        one_by_one = units.most == 1 or not tiles.has_piece
        lanes = tiles.unit_lanes
        view, y = _call(of_units, view, layer, what, units, tiles, y, first, units.num_units, lanes, one_by_one)
    return view, y.astype(what.out.dtype)


def _call(name, view, layer, what, units, tiles, out, first, stop, lanes, one_by_one):
    """Run the units from `first` to `stop`; `out` has the outputs of earlier units, if any.

    Without it the result begins as uninitialised memory, which the loops fill completely, so no zeros are written
    first.
    """
    width, (rows, stride) = tiles.width(lanes), tiles.shape
    step, number = (rows * stride, tiles.apart) if tiles.apart > 1 else (width, stride // width)
    given = (layer, what.place.row, first, stop, rows, stride, width, one_by_one, units.decodes_only)
    numbers = jnp.stack([jnp.asarray(of, jnp.int32) for of in given])
    arrays = (units.start, units.length, units.read, units.write, step * jnp.arange(number, dtype=jnp.int32))
    like = [jax.ShapeDtypeStruct(view.shape, view.dtype), jax.ShapeDtypeStruct(what.out.shape, jnp.float32)]
    given = (view, numbers, *arrays, *tiles.operands)
    before = () if out is None else (out,)
    aliases = {0: 0, **{len(given): 1 for _ in before}}
    return jax.ffi.ffi_call(name, like, input_output_aliases=aliases)(*given, *before)


def _wide(*arrays: Array) -> tuple[Array, ...]:
    return tuple(array.astype(jnp.float32) for array in arrays)

"""Runs decodes of recurrences by Pallas Mosaic TPU kernels, in place; prompts as XLA does.

The functions that describe a recurrence decide whether the kernel takes it: its states must fill whole tiles of lanes,
as those of published models do. For other shapes they return None, and XLA runs the recurrence.
"""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

from pallas_kernels.recurrent import tpu_cells, tpu_ring, xla
from pallas_kernels.recurrent.layout import LANES, ROW_TILE, StatePlace, Units
from pallas_kernels.recurrent.recurrence import Recurrence
from pallas_kernels.recurrent.tpu_ring import PIECE_BYTES, Cell

SPAN = 64
"""Most rows of 128 channels that are updated together; more would not leave room in the registers."""


def takes(view: Shaped[Array, "blocks layers rows 128"], place: StatePlace) -> bool:
    """Tell whether a part of a state lies in whole tiles, its elements no narrower than the pool's."""
    tile = ROW_TILE * 4 // view.dtype.itemsize
    whole = view.shape[2] % tile == 0 and place.row % tile == 0
    return whole and place.dtype.itemsize % view.dtype.itemsize == 0


def conv(place: StatePlace, x: Array, weight: Array, bias: Array | None, activation: str | None) -> Cell | None:
    """Describe `pallas_kernels.recurrent.causal_conv`."""
    channels, width = weight.shape
    rows = place.rows(place.dtype)
    if channels % LANES or not _is_float(place) or rows * LANES * place.dtype.itemsize > PIECE_BYTES:
        return None
    taps, offset = weight.T, jnp.zeros(channels) if bias is None else bias
    return Cell(
        partial(tpu_cells.update_conv, width=width, silu=activation == "silu"),
        tpu_cells.begin_conv,
        _in_rows(x),
        (_in_rows(taps)[0], _in_rows(offset[None])[0][0]),
        rows,
        1,
        channels // LANES,
        scratch=((rows, LANES),),
    )


def scan(place: StatePlace, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array) -> Cell | None:
    """Describe `pallas_kernels.recurrent.selective_scan`."""
    steps = dt.astype(jnp.float32)
    return _of_channels(place, steps, steps * x, b[:, None], c[:, None], a.T, d * x)


def ssd(place: StatePlace, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array) -> Cell | None:
    """Describe `pallas_kernels.recurrent.ssd`."""
    (tokens, heads, width), steps = x.shape, dt.astype(jnp.float32)
    decay = jnp.repeat(jnp.exp(steps * a), width, axis=1)
    inputs, skip = (steps[..., None] * x).reshape(tokens, heads * width), d[:, None] * x
    return _of_channels(place, decay, inputs, b, c, None, skip)


def delta(place: StatePlace, q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> Cell | None:
    """Describe `pallas_kernels.recurrent.gated_delta`."""
    heads, size, width = place.shape
    if width != LANES or size % ROW_TILE or size > LANES or place.dtype != jnp.float32:
        return None
    together = _most(heads, size * LANES * 4)
    q, k = (jnp.pad(of.astype(jnp.float32), ((0, 0), (0, 0), (0, LANES - size))) for of in (q, k))
    decay, beta = (jnp.broadcast_to(of[..., None], v.shape) for of in (jnp.exp(log_decay.astype(jnp.float32)), beta))
    update = partial(tpu_cells.update_delta, heads=together, size=size)
    tokens = tuple(of.astype(jnp.float32) for of in (q, k, v, decay, beta))
    return Cell(update, tpu_cells.begin_delta, tokens, (), together * size, heads // together, heads)


def _of_channels(place, decay, inputs, b, c, rates, skip) -> Cell | None:
    """Describe a scan: `decay` and `inputs` are ``[tokens, ch]``, b and c ``[tokens, g, n]``. With `rates`, ``[n,
    ch]``, `decay` holds the steps, and the kernel computes ``exp(step * rate)``."""
    channels, (groups, n) = inputs.shape[1], b.shape[1:]
    rows = channels // LANES
    if channels % (LANES * groups) or rows // groups % ROW_TILE or place.dtype != jnp.float32:
        return None
    span = max(of for of in range(ROW_TILE, SPAN + 1, ROW_TILE) if rows // groups % of == 0)
    together = _most(n, rows * LANES * 4)
    tiles = -(-n // LANES)
    of_states = (_in_tiles(of.astype(jnp.float32), tiles) for of in (b, c))
    update = partial(tpu_cells.update_scan, states=together, rows=rows, groups=groups, span=span)
    columns = (groups, tiles * LANES, LANES)
    return Cell(
        update,
        tpu_cells.begin_scan,
        (*_in_rows(decay, inputs), *of_states),
        () if rates is None else _in_rows(rates),
        together * rows,
        n // together,
        rows,
        skip,
        (columns, columns),
    )


def run(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    units: Units,
    what: Recurrence,
    cell: Cell,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Shaped[Array, "blocks layers rows 128"], Shaped[Array, "tokens ..."]]:
    """Return the view and every token's output, 0 for tokens of no unit. The view is aliased to the result.

    Tokens that must be computed one by one run by XLA: each starts from the state that the one before it leaves.
    """
    if units.most == 1 and not units.decodes_only:
        return xla.run(view, layer, units, what)
    view, y = tpu_ring.decode(view, layer, what.place, units, cell, interpret=interpret)
    y = y.reshape(len(y), *what.out.shape[1:])
    y = y if cell.skip is None else y + cell.skip[: len(y)].reshape(y.shape)
    return xla.behind_decodes(view, layer, units, what, y)


def _is_float(place: StatePlace) -> bool:
    return place.dtype in (jnp.float32, jnp.bfloat16)


def _most(number: int, each: int) -> int:
    """Return the largest divisor of `number` so that that many items of `each` bytes fit in a piece, or 1."""
    most = max(1, PIECE_BYTES // each)
    return max(of for of in range(1, number + 1) if number % of == 0 and of <= most)


def _in_rows(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays ``[many, channels]`` as ``[many, rows, 128]`` in float32."""
    return tuple(of.astype(jnp.float32).reshape(len(of), -1, LANES) for of in arrays)


def _in_tiles(of: Array, tiles: int) -> Array:
    """Return ``[tokens, g, n]`` as ``[tokens, g * tiles, 128]``, padded with zeros."""
    padded = jnp.pad(of, ((0, 0), (0, 0), (0, tiles * LANES - of.shape[2])))
    return padded.reshape(len(of), math.prod(padded.shape[1:]) // LANES, LANES)

"""Runs decodes of recurrences by Pallas Mosaic TPU kernels, in place; prompts as XLA does.

The functions that describe a recurrence decide whether the kernel takes it: its states must fill whole tiles of lanes,
as those of published models do. For other shapes they return None, and XLA runs the recurrence.

Memory and loops outside a piece are those of `tpu_ring`; the ``update_`` functions are the arithmetic on a piece of a
state, [rows, 128] in VMEM. Loops over a piece's rows are unrolled: a piece is one block of instructions, whose loads,
arithmetic and stores the compiler interleaves. Vectors with one number per row of a state (B, C, keys, queries) arrive
along lanes; they are transposed into columns, [rows, 128] with the same number in all lanes of a row, once per token or
head, because multiplying with a row then needs no broadcast across lanes.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

from pallas_kernels.recurrent import tpu_ring, xla
from pallas_kernels.recurrent.layout import LANES, ROW_TILE, StatePlace, Units
from pallas_kernels.recurrent.recurrence import Recurrence
from pallas_kernels.recurrent.tpu_ring import PIECE_BYTES, Cell


def column(row: jax.Array) -> jax.Array:
    """Return 128 rows; row i holds lane i of `row`, ``[1, 128]``, in all its lanes."""
    return jnp.broadcast_to(row, (LANES, LANES)).T


def column_by_product(row: jax.Array) -> jax.Array:
    """Return `column` of a finite row by a product with ones, exact for numbers of 2^-100 and more.

    A float32 is cut into three numbers of eight bits, which bfloat16 holds; their sum is exact in any order. It comes
    some hundred cycles after its row, where a transposition comes sooner but occupies its unit for 64.
    """
    high = _cut(row)
    middle = _cut(row - high)
    part = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)
    parts = jnp.where(part == 0, high, jnp.where(part == 1, middle, jnp.where(part == 2, row - high - middle, 0)))
    ones = jnp.ones(parts.shape, jnp.bfloat16)
    by_part = (((0,), (0,)), ((), ()))
    return jax.lax.dot_general(parts.astype(jnp.bfloat16), ones, by_part, preferred_element_type=jnp.float32)


def _cut(numbers: jax.Array) -> jax.Array:
    """Return float32 without the bits that bfloat16 lacks; XLA may take a conversion there and back for none."""
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)


def begin_scan(tokens, out, scratch):
    """Transpose B and C into columns in scratch, ``[groups, n, 128]`` each, and clear the output."""
    for given, columns in zip(tokens[2:], scratch, strict=True):
        groups, n, _ = columns.shape
        tiles = n // LANES
        for group in range(groups):
            for tile in range(tiles):
                columns[group, pl.ds(tile * LANES, LANES)] = column(given[pl.ds(group * tiles + tile, 1)])
    out[...] = jnp.zeros(out.shape, out.dtype)


def update_scan(piece, number, tokens, constants, out, scratch, *, states, rows, groups, span):
    """Update `states` numbers of each channel: a piece has `states` times `rows` rows, and a row is 128 channels.

    tokens: decays (steps, if constants hold rates), inputs, B, C.
    """
    decays, inputs, _, _ = tokens
    of_b, of_c = scratch
    # Spans of channels outside: their decays, inputs and outputs stay in registers over all states of the piece.
    for first in range(0, rows, span):
        channels, group = pl.ds(first, span), first // (rows // groups)
        decay, given, y = decays[channels], inputs[channels], out[channels]
        for state in range(states):
            n = number * states + state
            kept = jnp.exp(decay * constants[0][n, channels]) if constants else decay
            own = pl.ds(n, 1)
            value = kept * piece.read(state * rows + first, span) + of_b[group, own] * given
            y += of_c[group, own] * value
            piece.write(state * rows + first, value)
        out[channels] = y


def begin_delta(tokens, out, scratch):
    """Do nothing: a head's output is written once."""


def update_delta(piece, number, tokens, constants, out, scratch, *, heads, size):
    """Update some heads: a head's state is [size, 128], keys down and values across.

    tokens: queries, keys, values, decays, rates, one row per head.
    """
    queries, keys, values, decays, rates = tokens
    as_column = column_by_product if heads >= BY_PRODUCT else column
    for nth in range(heads):
        head = pl.ds(number * heads + nth, 1)
        key, query = (as_column(of[head])[:size] for of in (keys, queries))
        state = decays[head] * piece.read(nth * size, size)
        said = jnp.sum(key * state, axis=0, keepdims=True)
        state += key * (rates[head] * (values[head] - said))
        piece.write(nth * size, state)
        out[head] = jnp.sum(query * state, axis=0, keepdims=True)


def begin_conv(tokens, out, scratch):
    """Do nothing: the output is written once."""


def update_conv(piece, number, tokens, constants, out, scratch, *, width, silu):
    """Convolve, and move the inputs by one. tokens: inputs; constants: weights [width, rows, 128], offset [rows, 128];
    scratch: the state, whose parts begin anywhere in a tile."""
    (inputs,), (weights, offset), (window,) = tokens, constants, scratch
    # A tap has `rows` rows, which need not be whole tiles. The state goes through float32 scratch, where slices may
    # begin at any row; the ring's buffer is read and written whole.
    rows, given = offset.shape[0], inputs[...]
    window[...] = piece.read(0, window.shape[0])
    y = offset[...] + weights[width - 1] * given
    taps = [window[pl.ds(tap * rows, rows)] for tap in range(width - 1)]
    for tap, before in enumerate(taps):
        y += weights[tap] * before
    for tap, then in enumerate([*taps[1:], given]):
        window[pl.ds(tap * rows, rows)] = then
    piece.write(0, window[...])
    out[...] = y * jax.nn.sigmoid(y) if silu else y


SUBLANES = 8
"""Rows of a register of float32."""
BY_PRODUCT = 16
"""Heads of a piece from which on their columns come by products: one after the other, while others are updated."""
DELTA_BYTES = 2**20
"""Most bytes of a piece of the gated delta rule: as many heads as make the products' latency short next to them."""
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
        partial(update_conv, width=width, silu=activation == "silu"),
        begin_conv,
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
    together = _most(heads, size * LANES * 4, DELTA_BYTES)
    q, k = (jnp.pad(of.astype(jnp.float32), ((0, 0), (0, 0), (0, LANES - size))) for of in (q, k))
    decay, beta = (jnp.broadcast_to(of[..., None], v.shape) for of in (jnp.exp(log_decay.astype(jnp.float32)), beta))
    update = partial(update_delta, heads=together, size=size)
    tokens = tuple(of.astype(jnp.float32) for of in (q, k, v, decay, beta))
    return Cell(update, begin_delta, tokens, (), together * size, heads // together, heads)


def _of_channels(place, decay, inputs, b, c, rates, skip) -> Cell | None:
    """Describe a scan: `decay` and `inputs` are ``[tokens, ch]``, b and c ``[tokens, g, n]``. With `rates`, ``[n,
    ch]``, `decay` holds the steps, and the kernel computes ``exp(step * rate)``."""
    channels, (groups, n) = inputs.shape[1], b.shape[1:]
    rows = channels // LANES
    if channels % (LANES * groups) or rows // groups % ROW_TILE or place.dtype != jnp.float32:
        return None
    span = max(of for of in range(ROW_TILE, SPAN + 1, ROW_TILE) if rows // groups % of == 0)
    together = _most(n, rows * LANES * 4, PIECE_BYTES)
    tiles = -(-n // LANES)
    of_states = (_in_tiles(of.astype(jnp.float32), tiles) for of in (b, c))
    update = partial(update_scan, states=together, rows=rows, groups=groups, span=span)
    columns = (groups, tiles * LANES, LANES)
    return Cell(
        update,
        begin_scan,
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


def _most(number: int, each: int, piece: int) -> int:
    """Return the largest divisor of `number` so that that many items of `each` bytes fit in `piece` bytes, or 1."""
    most = max(1, piece // each)
    return max(of for of in range(1, number + 1) if number % of == 0 and of <= most)


def _in_rows(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays ``[many, channels]`` as ``[many, rows, 128]`` in float32."""
    return tuple(of.astype(jnp.float32).reshape(len(of), -1, LANES) for of in arrays)


def _in_tiles(of: Array, tiles: int) -> Array:
    """Return ``[tokens, g, n]`` as ``[tokens, g * tiles, 128]``, padded with zeros."""
    padded = jnp.pad(of, ((0, 0), (0, 0), (0, tiles * LANES - of.shape[2])))
    return padded.reshape(len(of), math.prod(padded.shape[1:]) // LANES, LANES)

"""Runs decodes of recurrences as Triton kernels, in place: states in and out by block; prompts as XLA does.

Memory. The pool stays in global memory and is donated. A program loads some whole columns of one decode's state, as a
tile such as [STATE_LANES, CHANNEL_LANES], into registers, updates them there, and stores them to the block that takes
the state. The numbers that an output sums over run down a column, so a sum stays within the program, and columns are
neighbours in memory. If the pool's elements are narrower than the state's, RATIO rows of the pool hold one row of the
state (`pallas_kernels.recurrent.layout`).

Loops. There are none: the grid is (decodes, tiles of columns), with heads between the two for the delta rule. Programs
of padding decodes end at once. A program loads its part of a state before it stores it, with a barrier between, because
read and write block may be the same.

Arguments that all kernels have: `at` int32 ``[layer, first row of the part, number of decodes]``; `read` and `write`,
the units' blocks, negative for none; BLOCK_STRIDE and LAYER_STRIDE, elements of the pool in a block and in a layer of
one. Constants that end in `_LANES` are powers of two.

The shapes of launches were chosen by reasoning, so that a program's part of a state fits in its threads' registers.
They have not been tuned on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Int, Shaped

from pallas_kernels.gpu_launch import Launch, Launcher, like, triton_call
from pallas_kernels.recurrent import xla
from pallas_kernels.recurrent.layout import LANES, StatePlace, Units
from pallas_kernels.recurrent.recurrence import Recurrence


@triton.jit
def home_of(view, at, block, BLOCK_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr):
    """Return the pointer to a layer's state in a block; 64 bits, as a pool may have more than 2**31 elements."""
    layer, row = tl.load(at), tl.load(at + 1)
    return view + block.to(tl.int64) * BLOCK_STRIDE + layer.to(tl.int64) * LAYER_STRIDE + row * 128


@triton.jit
def where(inside, block):
    """Return the mask `inside`, or an empty mask if `block` is negative, which means that there is none."""
    return tl.where(inside, block, -1) >= 0


@triton.jit
def load_state(home, element, mask, RATIO: tl.constexpr):
    """Return elements of a state in float32."""
    if RATIO == 1:
        state = tl.load(home + element, mask=mask, other=0.0).to(tl.float32)
    else:
        # A state's row of 128 numbers is RATIO rows of the pool, the low bits first: the parts of one number lie 128
        # elements apart. Bits are moved as integers, since a move of floats may change bits.
        place = element // 128 * (RATIO * 128) + element % 128
        bits: tl.constexpr = 32 // RATIO
        words = home.to(tl.pointer_type(tl.int16 if RATIO == 2 else tl.int8)) + place
        whole = tl.zeros(element.shape, tl.int32)
        for piece in tl.static_range(RATIO):
            part = tl.load(words + piece * 128, mask=mask, other=0).to(tl.int32) & ((1 << bits) - 1)
            whole = whole | part << (piece * bits)
        state = whole.to(tl.float32, bitcast=True)
    return state


@triton.jit
def store_state(home, element, state, mask, RATIO: tl.constexpr):
    """Store elements of a state, given in float32; the inverse of `load_state`."""
    if RATIO == 1:
        tl.store(home + element, state.to(home.dtype.element_ty), mask=mask)
    else:
        place = element // 128 * (RATIO * 128) + element % 128
        bits: tl.constexpr = 32 // RATIO
        dtype: tl.constexpr = tl.int16 if RATIO == 2 else tl.int8
        words, whole = home.to(tl.pointer_type(dtype)) + place, state.to(tl.int32, bitcast=True)
        for piece in tl.static_range(RATIO):
            tl.store(words + piece * 128, (whole >> (piece * bits)).to(dtype), mask=mask)


@triton.jit
def scan_decodes(
    at,
    read,
    write,
    x,
    dt,
    a,
    b,
    c,
    d,
    view,
    view_again,
    out,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    RATIO: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    STATES: tl.constexpr,
    RATES_APART: tl.constexpr,
    CHANNEL_LANES: tl.constexpr,
    STATE_LANES: tl.constexpr,
):
    """Program (u, t) scans decode u's channels from ``t * CHANNEL_LANES`` on; HEAD neighbouring channels share dt and
    d, GROUP share b and c. a is [STATES, CHANNELS] with RATES_APART, else a number a head."""
    unit = tl.program_id(0)
    if unit < tl.load(at + 2):
        channel = tl.program_id(1) * CHANNEL_LANES + tl.arange(0, CHANNEL_LANES)
        n = tl.arange(0, STATE_LANES)
        mine, head = channel < CHANNELS, channel // HEAD
        inside = (n < STATES)[:, None] & mine[None, :]
        element = n[:, None] * CHANNELS + channel[None, :]
        source, goal = tl.load(read + unit), tl.load(write + unit)
        home = home_of(view, at, tl.maximum(source, 0), BLOCK_STRIDE, LAYER_STRIDE)
        state = load_state(home, element, where(inside, source), RATIO)
        token = unit.to(tl.int64)
        step = tl.load(dt + token * (CHANNELS // HEAD) + head, mask=mine, other=0.0).to(tl.float32)
        given = tl.load(x + token * CHANNELS + channel, mask=mine, other=0.0).to(tl.float32)
        if RATES_APART:
            decay = tl.exp(step[None, :] * tl.load(a + element, mask=inside, other=0.0))
        else:
            decay = tl.exp(step * tl.load(a + head, mask=mine, other=0.0))[None, :]
        # b and c are [tokens, groups, STATES]; all channels of a group read the same STATES numbers.
        state_of_token = token * (CHANNELS // GROUP * STATES) + (channel // GROUP)[None, :] * STATES + n[:, None]
        of_b = tl.load(b + state_of_token, mask=inside, other=0.0).to(tl.float32)
        of_c = tl.load(c + state_of_token, mask=inside, other=0.0).to(tl.float32)
        state = decay * state + of_b * (step * given)[None, :]
        skip = tl.load(d + head, mask=mine, other=0.0)
        y = tl.sum(of_c * state, 0) + skip * given
        tl.store(out + token * CHANNELS + channel, y.to(out.dtype.element_ty), mask=mine)
        tl.debug_barrier()  # what one thread overwrites may be another's to read
        home = home_of(view, at, tl.maximum(goal, 0), BLOCK_STRIDE, LAYER_STRIDE)
        store_state(home, element, state, where(inside, goal), RATIO)


@triton.jit
def delta_decodes(
    at,
    read,
    write,
    q,
    k,
    v,
    log_decay,
    beta,
    view,
    view_again,
    out,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
):
    """Program (u, h, t) takes decode u's head h, and of its values those from ``t * VALUE_LANES`` on."""
    unit, head = tl.program_id(0), tl.program_id(1)
    if unit < tl.load(at + 2):
        value = tl.program_id(2) * VALUE_LANES + tl.arange(0, VALUE_LANES)
        lane = tl.arange(0, KEY_LANES)
        inside = (lane < KEYS)[:, None] & (value < VALUES)[None, :]
        element = (head * KEYS + lane[:, None]) * VALUES + value[None, :]
        source, goal = tl.load(read + unit), tl.load(write + unit)
        home = home_of(view, at, tl.maximum(source, 0), BLOCK_STRIDE, LAYER_STRIDE)
        state = load_state(home, element, where(inside, source), RATIO)
        row = unit.to(tl.int64) * HEADS + head
        query = tl.load(q + row * KEYS + lane, mask=lane < KEYS, other=0.0).to(tl.float32)
        key = tl.load(k + row * KEYS + lane, mask=lane < KEYS, other=0.0).to(tl.float32)
        wanted = tl.load(v + row * VALUES + value, mask=value < VALUES, other=0.0).to(tl.float32)
        # state is [keys, values]: decay it, move its value for the key towards `wanted`, then read it with the query.
        state *= tl.exp(tl.load(log_decay + row).to(tl.float32))
        missing = tl.load(beta + row).to(tl.float32) * (wanted - tl.sum(key[:, None] * state, 0))
        state += key[:, None] * missing[None, :]
        y = tl.sum(query[:, None] * state, 0)
        tl.store(out + row * VALUES + value, y.to(out.dtype.element_ty), mask=value < VALUES)
        tl.debug_barrier()  # what one thread overwrites may be another's to read
        home = home_of(view, at, tl.maximum(goal, 0), BLOCK_STRIDE, LAYER_STRIDE)
        store_state(home, element, state, where(inside, goal), RATIO)


@triton.jit
def conv_decodes(
    at,
    read,
    write,
    x,
    weight,
    bias,
    view,
    view_again,
    out,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    RATIO: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    CHANNEL_LANES: tl.constexpr,
    TAP_LANES: tl.constexpr,
):
    """Program (u, t) convolves decode u's channels from ``t * CHANNEL_LANES`` on; weight is [CHANNELS, WIDTH]."""
    unit = tl.program_id(0)
    if unit < tl.load(at + 2):
        channel = tl.program_id(1) * CHANNEL_LANES + tl.arange(0, CHANNEL_LANES)
        tap = tl.arange(0, TAP_LANES)
        mine, before = channel < CHANNELS, tap < WIDTH - 1
        inside = before[:, None] & mine[None, :]
        element = tap[:, None] * CHANNELS + channel[None, :]
        source, goal = tl.load(read + unit), tl.load(write + unit)
        home = home_of(view, at, tl.maximum(source, 0), BLOCK_STRIDE, LAYER_STRIDE)
        # The state is the last WIDTH - 1 inputs, [TAP_LANES, CHANNEL_LANES] in registers, the oldest first.
        window = load_state(home, element, where(inside, source), RATIO)
        place = unit.to(tl.int64) * CHANNELS + channel
        given = tl.load(x + place, mask=mine, other=0.0).to(tl.float32)
        of_taps = tl.load(weight + channel[None, :] * WIDTH + tap[:, None], mask=inside, other=0.0)
        last = tl.load(weight + channel * WIDTH + (WIDTH - 1), mask=mine, other=0.0)
        y = tl.sum(of_taps * window, 0) + last * given + tl.load(bias + channel, mask=mine, other=0.0)
        if SILU:
            y = y / (1 + tl.exp(-y))
        tl.store(out + place, y.to(out.dtype.element_ty), mask=mine)
        tl.debug_barrier()  # inputs move by one: what one thread overwrites is another's to read
        home = home_of(view, at, tl.maximum(goal, 0), BLOCK_STRIDE, LAYER_STRIDE)
        moved = where(inside & (tap > 0)[:, None], goal)
        store_state(home, tl.where(moved, element - CHANNELS, 0), window, moved, RATIO)
        newest = (WIDTH - 2) * CHANNELS + channel
        store_state(home, newest, given, where(mine, goal), RATIO)


PROGRAM_NUMBERS = 4096
"""Numbers of a state that a program holds: 32 registers a thread."""
MAX_STATES = 256
"""Most numbers of a column of a state: one program holds whole columns."""
NUM_WARPS = 4


@dataclass(frozen=True)
class Decode:
    """Describes the launch of a recurrence's decodes.

    Attributes:
        kernel: `scan_decodes`, `delta_decodes` or `conv_decodes`.
        operands: the arrays it reads, in order.
        programs: of one decode, along each axis.
        constants: those of the kernel that are not the pool's.
    """

    kernel: Any
    operands: tuple[Array, ...]
    programs: tuple[int, ...]
    constants: Mapping[str, Any]


def takes(view: Shaped[Array, "blocks layers rows 128"], place: StatePlace) -> bool:
    """Tell whether the state is float32 in a pool of narrower numbers, or of the pool's own dtype."""
    narrower = place.dtype == jnp.float32 and view.dtype.itemsize in (1, 2)
    return narrower or (place.dtype == view.dtype and view.dtype in (jnp.float32, jnp.bfloat16, jnp.float16))


def conv(place: StatePlace, x: Array, weight: Array, bias: Array | None, activation: str | None) -> Decode | None:
    """Describe `pallas_kernels.recurrent.causal_conv`."""
    channels, width = weight.shape
    lanes = min(256, _power_of_two(channels))
    constants = {
        "CHANNELS": channels,
        "WIDTH": width,
        "SILU": activation == "silu",
        "CHANNEL_LANES": lanes,
        "TAP_LANES": _power_of_two(width - 1),
    }
    offset = jnp.zeros(channels) if bias is None else bias
    operands = (x, *(of.astype(jnp.float32) for of in (weight, offset)))
    return Decode(conv_decodes, operands, (-(-channels // lanes),), constants)


def scan(place: StatePlace, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array) -> Decode | None:
    """Describe `pallas_kernels.recurrent.selective_scan`."""
    n, channels = place.shape
    return _of_channels((x, dt, a.T, b, c, d), n, channels, head=1, group=channels, rates_apart=True)


def ssd(place: StatePlace, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array) -> Decode | None:
    """Describe `pallas_kernels.recurrent.ssd`."""
    n, groups, heads, width = place.shape  # heads of each group
    channels = groups * heads * width
    return _of_channels((x, dt, a, b, c, d), n, channels, head=width, group=heads * width, rates_apart=False)


def delta(place: StatePlace, q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> Decode | None:
    """Describe `pallas_kernels.recurrent.gated_delta`."""
    heads, keys, values = place.shape
    if keys > MAX_STATES:
        return None
    key_lanes = _power_of_two(keys)
    lanes = _columns(values, key_lanes)
    constants = {"HEADS": heads, "KEYS": keys, "VALUES": values, "KEY_LANES": key_lanes, "VALUE_LANES": lanes}
    return Decode(delta_decodes, (q, k, v, log_decay, beta), (heads, -(-values // lanes)), constants)


def _of_channels(operands, n: int, channels: int, *, head: int, group: int, rates_apart: bool) -> Decode | None:
    if n > MAX_STATES:
        return None
    x, dt, a, b, c, d = operands
    state_lanes = _power_of_two(n)
    lanes = _columns(channels, state_lanes)
    constants = {
        "CHANNELS": channels,
        "HEAD": head,
        "GROUP": group,
        "STATES": n,
        "RATES_APART": rates_apart,
        "CHANNEL_LANES": lanes,
        "STATE_LANES": state_lanes,
    }
    wide = (x, dt, a.astype(jnp.float32), b, c, d.astype(jnp.float32))
    return Decode(scan_decodes, wide, (-(-channels // lanes),), constants)


def run(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    units: Units,
    what: Recurrence,
    decode: Decode,
    *,
    launch: Launcher = triton_call,
) -> tuple[Shaped[Array, "blocks layers rows 128"], Shaped[Array, "tokens ..."]]:
    """Return the view and every token's output, 0 for tokens of no unit. The view is aliased to the result.

    Tokens that must be computed one by one run by XLA: each starts from the state that the one before it leaves.
    """
    if units.most == 1 and not units.decodes_only:
        return xla.run(view, layer, units, what)
    place, decodes = what.place, min(len(what.operands[0]), len(units.read))
    given = (layer, place.row, units.num_decodes)
    at = jnp.stack([jnp.asarray(of, jnp.int32) for of in given])
    inputs = (at, units.read, units.write, *decode.operands, view)
    of_pool = {
        "BLOCK_STRIDE": view.size // view.shape[0],
        "LAYER_STRIDE": view.shape[2] * LANES,
        "RATIO": place.dtype.itemsize // view.dtype.itemsize,
    }
    out = jax.ShapeDtypeStruct((decodes, *what.out.shape[1:]), what.out.dtype)
    described = Launch(
        decode.kernel,
        grid=(decodes, *decode.programs),
        out=(like(view), out),
        aliases={len(inputs) - 1: 0},
        constants=of_pool | dict(decode.constants),
        num_warps=NUM_WARPS,
    )
    view, y = launch(described, *inputs)
    return xla.behind_decodes(view, layer, units, what, y)


def _columns(columns: int, lanes: int) -> int:
    """Return the columns of a program whose columns have `lanes` numbers."""
    return min(_power_of_two(columns), max(16, PROGRAM_NUMBERS // lanes))


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

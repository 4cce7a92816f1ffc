"""Runs decodes of recurrences as Triton kernels, in place; prompts as XLA does.

The shapes of launches were chosen by reasoning, so that a program's part of a state fits in its threads' registers.
They have not been tuned on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.gpu_launch import Launch, Launcher, like, triton_call
from pallas_kernels.recurrent import xla
from pallas_kernels.recurrent.gpu_kernels import conv_decodes, delta_decodes, scan_decodes
from pallas_kernels.recurrent.layout import LANES, StatePlace, Units
from pallas_kernels.recurrent.recurrence import Recurrence

PROGRAM_NUMBERS = 4096
"""Numbers of a state that a program holds: 32 registers a thread."""
MAX_STATES = 256
"""Most numbers of a column of a state: one program holds whole columns."""
NUM_WARPS = 4


@dataclass(frozen=True)
class Decode:
    """Describes the launch of a recurrence's decodes.

    Attributes:
        kernel: one of `gpu_kernels`.
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

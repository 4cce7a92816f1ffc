"""Counts how fast the TPU's decode kernels of recurrent layers could go through states, in the compiler's schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, empty, need_compiler, schedule_dumps
from scripts.compiled_code.llo_bundles import inner_copying_turn, last_copying_turn, parse
from scripts.compiled_code.tpu_kernels import CHIPS, Chip

BLOCKS, LAYERS, SEQS = 256, 4, 64


class Layer(NamedTuple):
    """Describes a recurrence on one device: kernel, shape of a state, its dtype, and its operands' shapes."""

    kernel: str
    state: tuple[int, ...]
    operands: Callable[[int], tuple[tuple[int, ...], ...]]
    dtype: str = "float32"


def conv(channels: int, width: int = 4) -> Layer:
    def shapes(tokens):
        return (tokens, channels), (channels, width), (channels,)

    return Layer("causal_conv", (channels, width - 1), shapes, "bfloat16")


def scan(channels: int, n: int = 16) -> Layer:
    def shapes(tokens):
        return (tokens, channels), (tokens, channels), (channels, n), (tokens, n), (tokens, n), (channels,)

    return Layer("selective_scan", (channels, n), shapes)


def ssd(heads: int, p: int = 64, n: int = 128, groups: int = 1) -> Layer:
    def shapes(tokens):
        of_groups = (tokens, groups, n)
        return (tokens, heads, p), (tokens, heads), (heads,), of_groups, of_groups, (heads,)

    return Layer("ssd", (heads, p, n), shapes)


def delta(heads: int, k: int = 128, v: int = 128) -> Layer:
    def shapes(tokens):
        return (tokens, heads, k), (tokens, heads, k), (tokens, heads, v), (tokens, heads), (tokens, heads)

    return Layer("gated_delta", (heads, k, v), shapes)


SHAPES = {
    "jamba-mini conv": conv(8192),
    "jamba-mini scan": scan(8192),
    "jamba-mini x8 scan": scan(1024),
    "bamba-9b ssd": ssd(128),
    "bamba-9b x8 ssd": ssd(16),
    "codestral-mamba ssd": ssd(128, groups=8),
    "qwen3-next conv": conv(8192),
    "qwen3-next delta": delta(32),
    "qwen3-next x8 delta": delta(4),
}


def recurrent(
    targets: list[str] = ["v5e", "v6e"],  # noqa: B006 (never changed)
    layers: list[str] = list(SHAPES),  # noqa: B006
) -> Iterator[Row]:
    """Cycles for one sequence's token in one recurrent layer of a decode of 64 sequences: some minutes for all.

    Compiles `pallas_kernels.recurrent`. "bytes/cycle" are those of the state, which is read and written; "HBM" are
    those that the chip's memory delivers in a cycle. At a ratio above 1 the kernel is faster than the memory. The
    cycles are those of the turn of the grid that takes a token and, if a state has several pieces, of the turns of the
    loop over them. A bundle counts as one cycle; waits and stalls are not counted."""
    need_compiler("tpu")
    with schedule_dumps() as dumps:
        for target, chip in chosen("targets", targets, CHIPS).items():
            for name, layer in chosen("layers", layers, SHAPES).items():
                yield {"target": target, "layer": name} | _measure(chip, layer, dumps)


def _measure(chip: Chip, layer: Layer, dumps: Path) -> Row:
    """Return the rest of a row."""
    start = time.perf_counter()
    empty(dumps)
    lowered, state_bytes, pieces = _lower(chip, layer)
    lowered.compile()
    (final,) = dumps.glob("*recurrent_decode*-final_bundles.txt")
    bundles = parse(final.read_text())
    cycles = last_copying_turn(bundles).cycles
    if pieces > 1:
        cycles += (pieces - 1) * inner_copying_turn(bundles).cycles
    speed, hbm, seconds = 2 * state_bytes / cycles, chip.hbm / chip.clock, time.perf_counter() - start
    return {
        "state bytes": state_bytes,
        "pieces": pieces,
        "cycles": cycles,
        "bytes/cycle": round(speed),
        "HBM": round(hbm),
        "ratio": speed / hbm,
        "compile s": round(seconds),
    }


def _lower(chip: Chip, layer: Layer) -> tuple[Any, int, int]:
    """Return the lowered decode, bytes of a state, and pieces in which it goes through the kernel."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels import recurrent
    from pallas_kernels.recurrent.layout import StatePlace, Units
    from pallas_kernels.recurrent.tpu_ring import PIECE_BYTES

    device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
    here = NamedSharding(Mesh([device], "x"), P())

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    place = StatePlace(32, layer.state, jnp.dtype(layer.dtype))
    rows = place.rows(jnp.bfloat16)
    view = array(BLOCKS, LAYERS, 32 + rows, 128, dtype=jnp.bfloat16)
    given = tuple(array(*shape, dtype=jnp.float32) for shape in layer.operands(SEQS))

    def run(view, index, start, length, read, write, decodes, count, *operands):
        units = Units(start, length, read, write, decodes, count, most=1, decodes_only=True)
        return getattr(recurrent, layer.kernel)(view, index, place, units, *operands, impl="tpu")

    arrays = (*[array(SEQS)] * 4, array(), array())
    state_bytes = rows * 128 * 2
    lowered = jax.jit(run, donate_argnums=0).lower(view, array(), *arrays, *given)
    return lowered, state_bytes, -(-state_bytes // PIECE_BYTES)

"""Counts how fast the TPU's decode kernels of recurrent layers could go through states, in the compiler's schedule.

    python scripts/tpu_recurrent_schedule.py                     v5e and v6e, all layers: some minutes
    python scripts/tpu_recurrent_schedule.py --targets v5e --layers "bamba-9b ssd"

Compiles `pallas_kernels.recurrent` for a decode of 64 sequences and prints, for one sequence's token in one layer, the
cycles of the final bundles (`llo_bundles.py`), and how many of the state's bytes, which are read and written, that is a
cycle. Beside it stands what the chip's HBM delivers in one; at a ratio above 1 the kernel is faster than the memory.
Counted as `tpu_schedule.py` counts: a bundle takes one cycle; waits and stalls are not in it. The turn of the grid that
takes a token and, where a state has several pieces, the turns of the loop over them make a token's cycles.

It needs libtpu, as `tpu_schedule.py` does.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from compiler_env import default_env, run_again_in
from llo_bundles import inner_copying_turn, last_copying_turn, parse
from tpu_launches import CHIPS, Chip
from tpu_schedule import libtpu_version, prepare

BLOCKS, LAYERS, SEQS = 256, 4, 64
COLUMNS = "target | layer | state bytes | pieces | cycles | bytes/cycle | HBM | ratio | compile s"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=CHIPS, default=["v5e", "v6e"])
    parser.add_argument("--layers", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--env", type=Path, default=default_env("tpu"), help="environment with libtpu; default: %(default)s"
    )
    options = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        run_again_in(options.env, "tpu")
    with tempfile.TemporaryDirectory() as dumps:
        prepare(dumps)
        import jax

        print(f"jax {jax.__version__}, libtpu {libtpu_version()}\n")
        print(f"| {COLUMNS} |\n|" + "---|" * (1 + COLUMNS.count("|")))
        for target in options.targets:
            for name in options.layers:
                print(f"| {target} | {name} | {measure(CHIPS[target], SHAPES[name], Path(dumps))} |", flush=True)


def measure(chip: Chip, layer: Layer, dumps: Path) -> str:
    """Return the rest of a table's row."""
    start = time.perf_counter()
    for old in dumps.iterdir():
        old.unlink()
    lowered, state_bytes, pieces = lower(chip, layer)
    lowered.compile()
    (final,) = dumps.glob("*recurrent_decode*-final_bundles.txt")
    bundles = parse(final.read_text())
    cycles = last_copying_turn(bundles).cycles
    if pieces > 1:
        cycles += (pieces - 1) * inner_copying_turn(bundles).cycles
    speed, hbm, seconds = 2 * state_bytes / cycles, chip.hbm / chip.clock, time.perf_counter() - start
    figures = f"{state_bytes} | {pieces} | {cycles} | {speed:.0f} | {hbm:.0f} | {speed / hbm:.2f}"
    return f"{figures} | {seconds:.0f}"


def lower(chip: Chip, layer: Layer) -> tuple[Any, int, int]:
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


if __name__ == "__main__":
    main()

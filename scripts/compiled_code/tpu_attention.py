"""Counts how fast the TPU kernels could read KV memory, in the compiler's final schedule: no TPU is needed.

    python scripts/tpu_schedule.py                                  v5e and v6e, all shapes and kernels: an hour or more
    python scripts/tpu_schedule.py --targets v5e --shapes llama-3.1-8b --block-size 32

Compiles `pallas_kernels.paged_attention` and `jax.experimental.pallas.ops.tpu.ragged_paged_attention`, for decoding
64 sequences of up to 4096 tokens and for a mixed batch, finds the loop over a sequence's keys in the final bundles
(`llo_bundles.py`) and prints its cycles, the bytes of KV whose DMA a turn starts, their quotient, and its ratio to
what the chip's HBM delivers in a cycle. At a ratio above 1 the loop is faster than the memory. Beside it the query rows
of a KV head that a turn multiplies, and the share of the matrix units' peak that they make of its cycles where all are
queries of one prompt: in a batch with prompts that is what bounds the loop. (For decoding only a row a query head is
of use.) A mixed batch's row is our launch for prompts, whose turn is a chunk of rows: its bytes are its share of what
the chunks of a full tile read together. Last the cycles of the innermost loop that multiplies: where masked keys have
a loop of their own, up to 256 of them. A turn of `kv_write` (``--kernels kv_write``) is one run of tokens of a block,
and the bytes are read and written.

What it assumes: a bundle takes one cycle; waits for DMAs, stalls of VMEM and the start and end of a sequence are not
counted; the DMA engines keep up with the DMAs; a turn is one where the step computed is not masked and the step
fetched is whole. jax's kernel runs with the block sizes its own table names for the device.

It needs libtpu: outside an environment that has it, `scripts/aot_env.sh` makes one (``--env``) and the script runs
again there.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from pathlib import Path

from compiler_env import default_env, run_again_in
from llo_bundles import (
    Bundle,
    Turn,
    last_copying_turn,
    multiplying_turn,
    parse,
    steady_turn,
    turn_without_copies,
)
from tpu_launches import CHIPS, KERNELS, KV_DTYPES, SHAPES, Chip, Heads, Launch

ROOT = Path(__file__).resolve().parents[1]

COLUMNS = (
    "target | shape | batch | kernel | cycles | KV bytes | bytes/cycle | HBM | ratio | rows | MXU | masked | compile s"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=CHIPS, default=["v5e", "v6e"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", choices=["decode", "mixed"], default=["decode", "mixed"])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["jpaged", "jax"])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv", choices=KV_DTYPES, default="bfloat16", help="what KV is held in; default: %(default)s")
    parser.add_argument(
        "--env", type=Path, default=default_env("tpu"), help="environment with libtpu; default: %(default)s"
    )
    options = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        run_again_in(options.env, "tpu")
    with tempfile.TemporaryDirectory() as dumps:
        prepare(dumps)
        import jax

        print(f"jax {jax.__version__}, libtpu {libtpu_version()}, blocks of {options.block_size}, {options.kv}\n")
        print(f"| {COLUMNS} |\n|" + "---|" * (1 + COLUMNS.count("|")))
        for target in options.targets:
            chip = CHIPS[target]
            for shape in options.shapes:
                for batch in options.batches:
                    for kernel in options.kernels:
                        row = measure(chip, SHAPES[shape], batch, kernel, options.block_size, options.kv, Path(dumps))
                        print(f"| {target} | {shape} | {batch} | {kernel} | {row} |", flush=True)


def prepare(dumps: str) -> None:
    """Set what libtpu reads when it is loaded: where to dump, and what a TPU VM's metadata would say."""
    os.environ.update(
        LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true",
        TPU_SKIP_MDS_QUERY="1",
        JAX_PLATFORMS="cpu",
        TPU_ACCELERATOR_TYPE="v5litepod-8",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )


def libtpu_version() -> str:
    from importlib.metadata import version

    return version("libtpu")


def measure(chip: Chip, heads: Heads, batch: str, kernel: str, block_size: int, kv: str, dumps: Path) -> str:
    """Return the rest of a table's row."""
    start = time.perf_counter()
    try:
        launch = KERNELS[kernel](chip, heads, batch, block_size, kv)
        bundles = compiled(launch, dumps)
        turn = turn_of(launch, bundles)
    except Exception as error:  # the row says what the compiler said
        return str(error).strip().splitlines()[0][:150]
    seconds = time.perf_counter() - start
    speed, hbm = turn.dma_bytes / turn.cycles, chip.hbm / chip.clock
    keys = launch.shared_keys or turn.dma_bytes / launch.key_bytes
    multiplied = 4 * launch.rows * heads.kv * heads.dim * keys / turn.cycles
    figures = f"{turn.cycles} | {turn.dma_bytes} | {speed:.0f} | {hbm:.0f} | {speed / hbm:.2f}"
    if launch.rows == 0:
        return f"{figures} | | | | {seconds:.0f}"
    masked = multiplying_turn(bundles).cycles
    return f"{figures} | {launch.rows} | {multiplied * chip.clock / chip.flops:.2f} | {masked} | {seconds:.0f}"


def turn_of(launch: Launch, bundles: list[Bundle]) -> Turn:
    """Return one turn of the kernel's loop in its steady state, with its share of the bytes that are copied."""
    if not launch.rows:
        return last_copying_turn(bundles)
    if not launch.shared_keys:
        return steady_turn(bundles)
    share = round(launch.shared_keys * launch.key_bytes / launch.sharing)
    return Turn(turn_without_copies(bundles).cycles, share)


def compiled(launch: Launch, dumps: Path) -> list[Bundle]:
    import jax

    for old in dumps.iterdir():
        old.unlink()
    with jax.set_mesh(launch.arguments[0].sharding.mesh):
        jax.jit(launch.function).lower(*launch.arguments).compile()
    (final,) = dumps.glob(f"*{launch.name}*-final_bundles.txt")
    return parse(final.read_text())


if __name__ == "__main__":
    main()

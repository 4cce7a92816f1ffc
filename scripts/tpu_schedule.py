"""How fast the TPU kernels could read KV memory, counted in the compiler's final schedule: no TPU is needed.

    python scripts/tpu_schedule.py                                  v5e and v6e, all shapes and kernels: an hour or more
    python scripts/tpu_schedule.py --targets v5e --shapes llama-3.1-8b --block-size 32

Compiles `pallas_kernels.paged_attention` and `jax.experimental.pallas.ops.tpu.ragged_paged_attention`, for decoding
64 sequences of up to 4096 tokens and for a mixed batch, finds the loop over a sequence's keys in the final bundles
(`llo_bundles.py`) and prints its cycles, the bytes of KV whose DMA a turn starts, their quotient, and its ratio to
what the chip's HBM delivers in a cycle. At a ratio above 1 the loop is faster than the memory. Beside it the query rows
of a KV head that a turn multiplies, and the share of the matrix units' peak that they make of its cycles where all are
queries of one prompt: in a batch with prompts that is what bounds the loop. (For decoding only a row a query head is
of use.)

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from llo_bundles import Turn, last_copying_turn, parse, steady_turn

ROOT = Path(__file__).resolve().parents[1]


class Chip(NamedTuple):
    """One TensorCore and the HBM it reads.

    Attributes:
        topology: smallest slice of it that can be compiled for.
        hbm: bytes a second, of the chip for one core.
        clock: Hz that the peak of its matrix units implies.
        flops: bfloat16 operations a second, of one core.
    """

    topology: str
    hbm: float
    clock: float
    flops: float


CHIPS = {
    "v5e": Chip("v5e:2x4", 819e9, 1.50e9, 197e12),
    "v5p": Chip("v5p:2x2x1", 2765e9 / 2, 1.75e9, 459e12 / 2),
    "v6e": Chip("v6e:2x2", 1640e9, 1.75e9, 918e12),
    "tpu7x": Chip("tpu7x:2x2x1", 7380e9 / 2, 2.20e9, 2307e12 / 2),
}


class Launch(NamedTuple):
    """A kernel to compile.

    Attributes:
        rows: query rows of a KV head that one turn multiplies; 0 = the kernel multiplies nothing.
        key_bytes: of the keys and values of one token in the pool.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rows: int
    key_bytes: float


class Heads(NamedTuple):
    """Attention heads of one device; `sinks`: each query head has one."""

    kv: int
    q_per_kv: int
    dim: int
    sinks: bool = False


SHAPES = {
    "llama-3.1-8b": Heads(8, 4, 128),
    "llama-3.1-8b x8": Heads(1, 4, 128),
    "llama-3.3-70b x8": Heads(1, 8, 128),
    "gemma-3-27b": Heads(16, 2, 128),
    "qwen3-0.6b": Heads(8, 2, 128),
    "gpt-oss-20b": Heads(8, 8, 64, sinks=True),
}
KV_DTYPES = {"bfloat16": "bfloat16", "int8": "int8", "fp8": "uint8"}
COLUMNS = "target | shape | batch | kernel | cycles | KV bytes | bytes/cycle | HBM | ratio | rows | MXU | compile s"
SEQS, CONTEXT, MIXED_TOKENS, LAYERS, BLOCKS = 64, 4096, 1024, 2, 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=CHIPS, default=["v5e", "v6e"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", choices=["decode", "mixed"], default=["decode", "mixed"])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["jpaged", "jax"])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv", choices=KV_DTYPES, default="bfloat16", help="what KV is held in; default: %(default)s")
    parser.add_argument("--env", type=Path, default=default_env(), help="environment with libtpu; default: %(default)s")
    options = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        run_again_with_libtpu(options.env)
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


def default_env() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("JPAGED_AOT_ENVS", cache / "jpaged" / "aot-envs")) / "tpu"


def run_again_with_libtpu(env: Path) -> None:
    """Replace this process by one in the environment `env`, which is made if need be."""
    make = ["bash", str(ROOT / "scripts" / "aot_env.sh"), "tpu", str(env)]
    subprocess.run(make, check=True, env=os.environ | {"PYTHON": sys.executable})
    python = str(env / "bin" / "python")
    os.execve(python, [python, *sys.argv], os.environ | {"PYTHONPATH": str(ROOT)})


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
    """The rest of a table's row."""
    start = time.perf_counter()
    try:
        launch = KERNELS[kernel](chip, heads, batch, block_size, kv)
        turn = compile_and_count(launch, dumps)
    except Exception as error:  # the row says what the compiler said
        return str(error).strip().splitlines()[0][:150]
    seconds = time.perf_counter() - start
    speed, hbm = turn.dma_bytes / turn.cycles, chip.hbm / chip.clock
    multiplied = 4 * launch.rows * heads.kv * heads.dim * turn.dma_bytes / launch.key_bytes / turn.cycles
    figures = f"{turn.cycles} | {turn.dma_bytes} | {speed:.0f} | {hbm:.0f} | {speed / hbm:.2f}"
    if launch.rows == 0:
        return f"{figures} | | | {seconds:.0f}"
    return f"{figures} | {launch.rows} | {multiplied * chip.clock / chip.flops:.2f} | {seconds:.0f}"


def compile_and_count(launch: Launch, dumps: Path) -> Turn:
    import jax

    for old in dumps.iterdir():
        old.unlink()
    with jax.set_mesh(launch.arguments[0].sharding.mesh):
        jax.jit(launch.function).lower(*launch.arguments).compile()
    name = "paged_attention" if launch.rows else "kv_write"
    (final,) = dumps.glob(f"*{name}*-final_bundles.txt")
    return (steady_turn if launch.rows else last_copying_turn)(parse(final.read_text()))


def shapes_of(chip: Chip, batch: str):
    """(function from shape and dtype to an argument on the chip, tokens of the batch, arguments all kernels take)."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
    here = NamedSharding(Mesh([device], "x"), P())

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    return array, SEQS if batch == "decode" else MIXED_TOKENS, device


def jpaged_kernel(chip: Chip, heads: Heads, batch: str, block_size: int, kv: str) -> Launch:
    import jax.numpy as jnp

    from pallas_kernels.kv_codes import TPU_TILE
    from pallas_kernels.layout import view_shape
    from pallas_kernels.paged_attention import paged_attention
    from pallas_kernels.paged_attention.tpu import queries_of_tile

    array, tokens, _ = shapes_of(chip, batch)
    dtype = jnp.dtype(KV_DTYPES[kv])

    longest = 1 if batch == "decode" else tokens

    def run(*arguments, sinks=None):
        return paged_attention(*arguments, scale=1.0, max_query_len=longest, sinks=sinks, impl="tpu")

    def run_with_sinks(sinks, *arguments):
        return run(*arguments, sinks=sinks)

    shape = view_shape(BLOCKS * 16 // block_size, LAYERS, heads.kv, heads.dim, block_size, dtype, TPU_TILE)
    rows = heads.q_per_kv * queries_of_tile(longest, heads.q_per_kv, dtype)
    key_bytes = prod(shape[2:]) * dtype.itemsize / block_size
    arguments = (
        array((tokens, heads.kv, heads.q_per_kv, heads.dim), jnp.bfloat16),
        array(shape, dtype),
        array(()),
        array((SEQS, CONTEXT // block_size)),
        array((SEQS + 1,)),
        array((SEQS,)),
    )
    if heads.sinks:
        sinks = array((heads.kv, heads.q_per_kv), jnp.bfloat16)
        return Launch(run_with_sinks, (sinks, *arguments), rows, key_bytes)
    return Launch(run, arguments, rows, key_bytes)


def jax_kernel(chip: Chip, heads: Heads, batch: str, block_size: int, kv: str) -> Launch:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_rpa
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as jax_tiles
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes as tuned

    array, tokens, device = shapes_of(chip, batch)
    if kv != "bfloat16":
        raise ValueError(f"kv={kv!r}: compared with jax's kernel in bfloat16 only")
    tuned.get_tpu_version = lambda: 7 if "7" in device.device_kind else int(device.device_kind.split()[1][1])
    tuned.get_device_name = lambda: " ".join(device.device_kind.split()[:2])

    q_heads, kv_heads = jax_tiles.get_min_heads_per_blk(
        heads.kv * heads.q_per_kv, 2 * heads.kv, jnp.bfloat16, jnp.bfloat16
    )
    key = jnp.bfloat16, jnp.bfloat16, q_heads, kv_heads // 2, heads.dim, block_size, tokens, CONTEXT // block_size
    _, queries = tuned.get_tuned_block_sizes(*key)

    def run(*arguments):
        return jax_rpa.ragged_paged_attention(*arguments, vmem_limit_bytes=100 * 2**20)

    arguments = (
        array((tokens, heads.kv * heads.q_per_kv, heads.dim), jnp.bfloat16),
        array((BLOCKS * 16 // block_size, block_size, 2 * heads.kv, heads.dim), jnp.bfloat16),
        array((SEQS,)),
        array((SEQS, CONTEXT // block_size)),
        array((SEQS + 1,)),
        array((1,)),
    )
    return Launch(run, arguments, heads.q_per_kv * queries, 2 * heads.kv * heads.dim * jnp.dtype(jnp.bfloat16).itemsize)


def kv_write_kernel(chip: Chip, heads: Heads, batch: str, block_size: int, kv: str) -> Launch:
    """A turn is one run of tokens of one block: in a decode step each sequence's token."""
    import jax.numpy as jnp

    from pallas_kernels.kv_codes import TPU_TILE
    from pallas_kernels.kv_write import kv_write
    from pallas_kernels.layout import view_shape

    array, tokens, _ = shapes_of(chip, batch)
    dtype = jnp.dtype(KV_DTYPES[kv])
    shape = view_shape(BLOCKS * 16 // block_size, LAYERS, heads.kv, heads.dim, block_size, dtype, TPU_TILE)
    new = array((tokens, heads.kv, heads.dim), jnp.bfloat16)

    def run(*arguments):
        return kv_write(*arguments, impl="tpu")

    key_bytes = prod(shape[2:]) * dtype.itemsize / block_size
    return Launch(run, (array(shape, dtype), array(()), new, new, array((tokens,))), 0, key_bytes)


KERNELS = {"jpaged": jpaged_kernel, "jax": jax_kernel, "kv_write": kv_write_kernel}

if __name__ == "__main__":
    main()

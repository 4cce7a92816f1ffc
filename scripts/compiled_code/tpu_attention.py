"""Counts how fast the TPU kernels of attention could read KV memory, in the compiler's final schedule."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, empty, need_compiler, schedule_dumps
from scripts.compiled_code.llo_bundles import (
    Bundle,
    Turn,
    last_copying_turn,
    multiplying_turn,
    parse,
    steady_turn,
    turn_without_copies,
)
from scripts.compiled_code.tpu_kernels import CHIPS, KERNELS, SHAPES, Chip, Heads, Launch


def attention(
    targets: list[str] = ["v5e", "v6e"],  # noqa: B006 (never changed)
    shapes: list[str] = list(SHAPES),  # noqa: B006
    batches: list[Literal["decode", "mixed"]] = ["decode", "mixed"],  # noqa: B006
    kernels: list[str] = ["jpaged", "jax"],  # noqa: B006
    block_size: int = 16,
    kv: Literal["bfloat16", "int8", "fp8"] = "bfloat16",
) -> Iterator[Row]:
    """Cycles of the loop over a sequence's keys, and the bytes of KV that it copies in them: an hour or more for all.

    Compiles `pallas_kernels.paged_attention` ("jpaged"), jax's `ragged_paged_attention` ("jax") and `kv_write`, for a
    decode of 64 sequences of up to 4096 tokens and for a mixed batch. A row has, of one turn of the loop:

      cycles, KV bytes    its bundles, and the bytes whose DMA it starts
      bytes/cycle, HBM    their quotient, and what the chip's HBM delivers in a cycle
      ratio               of these two: above 1 the loop is faster than the memory
      rows, MXU           query rows of a KV head that are multiplied, and the share of the matrix units' peak that they
                          make if all are queries of one prompt; with prompts this bounds the loop
      masked              cycles of the innermost loop that multiplies: up to 256 masked keys, if they have a loop

    The row of a mixed batch is our launch for prompts. Its turn is a chunk of rows, whose bytes are its share of those
    that the chunks of a full tile read together. A turn of kv_write is a run of tokens of a block, and its bytes are
    read and written.

    A bundle counts as one cycle. Waits for DMAs, stalls of VMEM and the start and end of a sequence are not counted,
    and the DMA engines are assumed to keep up. A turn computes a step without a mask and fetches a whole one. jax's
    kernel has the block sizes of its own table.
    """
    need_compiler("tpu")
    with schedule_dumps() as dumps:
        for target, chip in chosen("targets", targets, CHIPS).items():
            for shape, heads in chosen("shapes", shapes, SHAPES).items():
                for batch in batches:
                    for kernel in chosen("kernels", kernels, KERNELS):
                        row = _measure(chip, heads, batch, kernel, block_size, kv, dumps)
                        yield {"target": target, "shape": shape, "batch": batch, "kernel": kernel} | row


def _measure(chip: Chip, heads: Heads, batch: str, kernel: str, block_size: int, kv: str, dumps: Path) -> Row:
    """Return the rest of a row."""
    start = time.perf_counter()
    try:
        launch = KERNELS[kernel](chip, heads, batch, block_size, kv)
        bundles = compiled(launch, dumps)
        turn = _turn_of(launch, bundles)
    except Exception as error:  # the row has the compiler's message
        return {"error": str(error).strip().splitlines()[0][:150]}
    seconds = time.perf_counter() - start
    speed, hbm = turn.dma_bytes / turn.cycles, chip.hbm / chip.clock
    row: Row = {"cycles": turn.cycles, "KV bytes": turn.dma_bytes}
    row |= {"bytes/cycle": round(speed), "HBM": round(hbm), "ratio": speed / hbm}
    if launch.rows:
        keys = launch.shared_keys or turn.dma_bytes / launch.key_bytes
        multiplied = 4 * launch.rows * heads.kv * heads.dim * keys / turn.cycles
        row |= {"rows": launch.rows, "MXU": multiplied * chip.clock / chip.flops}
        row["masked"] = multiplying_turn(bundles).cycles
    return row | {"compile s": round(seconds)}


def _turn_of(launch: Launch, bundles: list[Bundle]) -> Turn:
    """Return one turn of the kernel's loop in its steady state, with its share of the bytes that are copied."""
    if not launch.rows:
        return last_copying_turn(bundles)
    if not launch.shared_keys:
        return steady_turn(bundles)
    share = round(launch.shared_keys * launch.key_bytes / launch.sharing)
    return Turn(turn_without_copies(bundles).cycles, share)


def compiled(launch: Launch, dumps: Path) -> list[Bundle]:
    """Compile a launch, and return its bundles."""
    import jax

    empty(dumps)
    with jax.set_mesh(launch.arguments[0].sharding.mesh):
        jax.jit(launch.function).lower(*launch.arguments).compile()
    (final,) = dumps.glob(f"*{launch.name}*-final_bundles.txt")
    return parse(final.read_text())

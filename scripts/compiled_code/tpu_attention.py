"""Simulates the TPU kernels of attention, of writing K and V, and of copying blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.simulated import compile_launch, row_of, simulate
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_kernels import KERNELS, SHAPES


def attention(
    targets: list[str] = list(CHIPS),  # noqa: B006 (never changed)
    shapes: list[str] = list(SHAPES),  # noqa: B006
    batches: list[Literal["decode", "mixed"]] = ["decode"],  # noqa: B006
    kernels: list[str] = list(KERNELS),  # noqa: B006
    lengths: list[Literal["equal", "drawn"]] = ["equal", "drawn"],  # noqa: B006
    block_size: int = 128,
    kv: Literal["bfloat16", "int8", "fp8"] = "bfloat16",
) -> Iterator[Row]:
    """Simulated time of a launch of attention, `kv_write` or `block_copy`: some ten seconds a row.

    A decode has 64 sequences of 4,096 keys, or of lengths drawn from 1 to 4,096; a mixed batch has 60 of them and four
    prompts of 241 tokens, and its row of attention is the launch for these. A row has:

      us                       the launch's time, waits for DMAs among it (`scalar_core`)
      bundles, us              the time of its bundles alone
      empty                    the share of them that is latency
      bytes                    that it reads from and writes to HBM; of a decode those that the shape needs, or an error
      bytes at HBM's peak, us  the time that these would take at least
      aim                      whether the launch meets its aim, see `aim_of`
      simulated; ...           the median error of such kernels' simulated times, where times were published
    """
    need_compiler("tpu")
    with schedule_dumps() as dumps:
        for target in chosen("targets", targets, CHIPS):
            for shape, heads in chosen("shapes", shapes, SHAPES).items():
                for batch in batches:
                    for make in chosen("kernels", kernels, KERNELS).values():
                        start, schedules = time.perf_counter(), None
                        for drawn in lengths:
                            launch = make(target, heads, batch, block_size, kv, drawn)
                            schedules = schedules or compile_launch(launch, dumps)[0]
                            row: Row = {"target": target, "shape": shape, "kernel": launch.name, "lengths": drawn}
                            row |= row_of(simulate(launch, schedules, target), launch.kind, target)
                            yield row | {"seconds": round(time.perf_counter() - start)}

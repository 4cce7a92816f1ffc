"""Counts the operations and estimated cycles of a layer in the step that libtpu compiles."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from scripts.cases import Row
from scripts.compiled_code.compilers import need_compiler
from scripts.compiled_code.layer_ops import layer_ops
from scripts.compiled_code.programs import published_config, step_programs, write_text
from scripts.compiled_code.tpu_kernels import CHIPS

SEQS, CONTEXT, TOKENS, BLOCK = 64, 8192, 512, 128
POOL_BYTES = 2 << 30


def layers(
    devices: list[str] = ["v5e-8", "v6e-8", "v5p-16", "tpu7x-8"],  # noqa: B006 (never changed)
    models: list[str] = ["llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b", "bamba-9b"],  # noqa: B006
    steps: list[Literal["decode", "mixed"]] = ["decode", "mixed"],  # noqa: B006
    hlo: Path | None = None,
) -> Iterator[Row]:
    """Operations of the loop over layers of a step, and their cycles: an hour for all.

    The batch has 64 sequences: a token each ("decode"), or 512 in all ("mixed"). A row has the operations of the loop's
    body; those that are the same for all layers; copies between HBM and VMEM; sorts; gathers; the compiler's estimate
    of the cycles, with those of kernels that replace XLA's operations; these alone; and the share of products with
    weights in all cycles (`layer_ops`). Kernels of the pool, of recurrences and all-reduces have no estimate, and the
    time of DMAs is not counted. On a tpu7x an all-reduce is four operations. A pattern of several layers is a loop's
    body as a whole. Devices hold whole experts (`enable_expert_parallel`). Tracing and compiling take "compile s" of
    processor time. `hlo` is a folder for the programs' texts.
    """
    need_compiler("tpu")
    from jpaged.planning.target_mesh import TPU_HOST

    os.environ.update(TPU_HOST)
    for device in devices:
        for model in models:
            for step in steps:
                start = time.process_time()
                text = getattr(_programs(device, model), step)().compile().as_text()
                write_text(hlo, f"{device}-{model}-{step}", text)
                chip = CHIPS[device.split("-")[0]]
                found = layer_ops(text, chip.hbm / chip.clock)
                share = {"products": found["products"] / found["cycles"]}
                row: Row = {"device": device, "model": model, "step": step} | found | share
                yield row | {"compile s": round(time.process_time() - start, 1)}


def _programs(device: str, model: str) -> Any:
    from jpaged.planning.devices import find_device
    from jpaged.planning.target_mesh import target_mesh

    config = published_config(model)
    return step_programs(
        config,
        target_mesh(find_device(device), compiled=True),
        dtype="bfloat16",
        stacked=True,
        kernel_impl="tpu",
        block_size=BLOCK,
        pool_bytes=POOL_BYTES,
        seqs=SEQS,
        tokens=TOKENS,
        context=CONTEXT,
        expert_parallel=getattr(config, "num_experts", 0) > 0,
    )

"""Compile and simulate kernels for TPUs at the shapes of published models, and print what they need, as JSON.

Run by `test_aot_kernels.py` inside the environment with libtpu, with arguments "target/shape/batch", for example
"v6e/llama-3.1-8b/decode", or "v6e/llama-3.1-8b/decode/int8" for KV in one byte; one program a line. The batch
"kv_write decode" is the writes of a decode, "write and attend decode" the launch of both; "recurrent" is a decode of
one of the shapes of `tpu_recurrent`. `scripts/compiled_code/tpu_kernels.py` has the other shapes, and its case
tpu-attention compiles all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scripts.compiled_code.compilers import schedule_dumps
from scripts.compiled_code.simulated import Launch, compile_launch, row_of, simulate
from scripts.compiled_code.tpu_kernels import KERNELS, SHAPES

BLOCK_SIZES = {"bfloat16": 128, "int8": 64, "fp8": 32}


def launch_of(target: str, shape: str, batch: str, kv: str = "bfloat16") -> Launch:
    from scripts.compiled_code import tpu_recurrent

    if batch == "recurrent":
        return tpu_recurrent.recurrent_launch(target, tpu_recurrent.SHAPES[shape])
    kernel, _, batch = batch.rpartition(" ")
    return KERNELS[kernel or "attention"](target, SHAPES[shape], batch, BLOCK_SIZES[kv], kv, "equal")


def report(name: str, dumps: Path) -> None:
    target, *what = name.split("/")
    launch = launch_of(target, *what)
    schedules, compiled = compile_launch(launch, dumps)
    view = max(launch.arguments, key=lambda array: array.size)
    sizes = {"view": view.size * view.dtype.itemsize, "temp": compiled.memory_analysis().temp_size_in_bytes}
    row = row_of(simulate(launch, schedules, target), launch.kind, target)
    print(json.dumps({"name": name} | sizes | {key: row[key] for key in ("us", "bytes", "empty")}), flush=True)


if __name__ == "__main__":
    with schedule_dumps() as folder:  # before jax is imported
        for argument in sys.argv[1:]:
            report(argument, folder)

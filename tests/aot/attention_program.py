"""Compile paged_attention for TPUs at the shapes of published models and print what it needs, as JSON.

Run by `test_aot_kernels.py` inside the environment with libtpu, with arguments "target/shape/batch", for example
"v6e/llama-3.1-8b/decode", or "v6e/llama-3.1-8b/decode/int8" for KV in one byte; one program a line.
`scripts/compiled_code/tpu_kernels.py` has the shapes; its case tpu-attention compiles all of them.
"""

from __future__ import annotations

import json
import sys

from targets import describe_tpu_host

from scripts.compiled_code.tpu_kernels import CHIPS, SHAPES, jpaged_kernel

BLOCK_SIZES = {"bfloat16": 16, "int8": 64, "fp8": 32}


def main(names: list[str]) -> None:
    describe_tpu_host()  # before jax is imported

    import jax

    for name in names:
        target, shape, batch, *coded = name.split("/")
        kv = coded[0] if coded else "bfloat16"
        launch = jpaged_kernel(CHIPS[target], SHAPES[shape], batch, BLOCK_SIZES[kv], kv)
        memory = jax.jit(launch.function).lower(*launch.arguments).compile().memory_analysis()
        view = max(launch.arguments, key=lambda array: array.size)
        sizes = {"view": view.size * view.dtype.itemsize, "temp": memory.temp_size_in_bytes}
        print(json.dumps({"name": name} | sizes), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

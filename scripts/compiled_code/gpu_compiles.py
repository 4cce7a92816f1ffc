"""Counts how many kernels Triton compiles for all shapes of an engine's steps on an NVIDIA GPU: no GPU is needed.

    python scripts/gpu_triton_compiles.py                         a Llama-3.1-8B on an H200
    python scripts/gpu_triton_compiles.py --seqs 64 --quantization int4

Steps are traced, not compiled. jax-triton compiles a kernel once for all launches of equal constants, dtypes, warps and
stages in a process, wherever they stand; it keeps nothing on disk. A row of the table has a kernel, the launches of it
in all shapes together (of two layers), and how often it is compiled.

It needs XLA's CUDA plugin: outside an environment that has it, `scripts/aot_env.sh` makes one (``--env``) and the
script runs again there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compiler_env import default_env, run_again_in

ROOT = Path(__file__).resolve().parents[1]
NOT_COMPILED = ("grid", "name", "out_shapes", "input_output_aliases", "debug", "serialized_metadata", "zeroed_outputs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quantization", choices=["int8", "int4", "fp8"], default=None)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of a step; default: %(default)s")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    parser.add_argument("--env", type=Path, default=default_env("cuda"), help="environment with the plugin")
    options = parser.parse_args()
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        run_again_in(options.env, "cuda")
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    shapes, launches, compiled = count(options)
    if options.json:
        print(json.dumps({"shapes": shapes, "launches": launches, "compiled": compiled}))
        return
    print(f"{shapes} shapes of steps\n\n| kernel | launches | compiled |\n|---|---|---|")
    for name in sorted(launches):
        print(f"| {name} | {launches[name]} | {compiled[name]} |")


def count(options: argparse.Namespace) -> tuple[int, dict[str, int], dict[str, int]]:
    """Trace every step's shape; returns how many there are, and each kernel's launches and compilations."""
    from gpu_step_bytes import step_programs

    from jpaged.execution.batch import empty_batch
    from jpaged.execution.caches.pool import abstract_pool
    from jpaged.execution.compile.buckets import Buckets
    from jpaged.execution.step import make_step
    from jpaged.planning.devices import find_device
    from jpaged.planning.target_mesh import target_capability, target_mesh

    device = find_device(options.device)
    mesh = target_mesh(device, compiled=True)
    found: Counter[tuple[str, str]] = Counter()
    with target_capability(device):
        made = step_programs(mesh, options)
        buckets = Buckets(max_num_seqs=options.seqs, max_num_batched_tokens=options.tokens)
        step = make_step(made.graphdef, made.spec, mesh, kernel_impl="gpu")
        all_of_them = [*buckets.decode, *buckets.mixed]
        for bucket in all_of_them:
            batch = empty_batch(bucket, made.spec, max_num_seqs=options.seqs, max_model_len=options.context)
            arrays = made.params, abstract_pool(made.spec, mesh), made._of_all(batch), made._last_tokens
            found.update(launches_of(step.trace(*arrays, decode_only=bucket.decode_only).jaxpr.jaxpr))
    launches: Counter[str] = Counter()
    for (name, _), number in found.items():
        launches[name] += number
    return len(all_of_them), dict(launches), dict(Counter(name for name, _ in found))


def launches_of(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """Yield each launch's kernel, and all that Triton compiles it for."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "triton_kernel_call":
            given = {name: value for name, value in equation.params.items() if name not in NOT_COMPILED}
            scalars = [(place, dtype, value == 1) for place, dtype, value in given.pop("scalar_args")]
            dtypes = [str(variable.aval.dtype) for variable in (*equation.invars, *equation.outvars)]
            kernel = given.pop("fn").__name__
            yield kernel, repr((scalars, dtypes, sorted(given.items(), key=lambda item: item[0])))
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from launches_of(inner)


if __name__ == "__main__":
    main()

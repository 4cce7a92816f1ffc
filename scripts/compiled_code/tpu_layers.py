"""Counts what a step runs once a layer on TPUs, in the program that libtpu compiles for them: no TPU is needed.

    python scripts/tpu_layer_ops.py                                          all devices, models and steps: an hour
    python scripts/tpu_layer_ops.py --devices v5e-8 --models llama-3.1-8b

A row has the operations of the loop over layers, those that are the same for all layers, the copies between HBM and
VMEM that are made meanwhile, sorts, gathers, the compiler's estimate of the operations' cycles with those of kernels
that stand in the place of XLA's operations, these alone, and the share of products with weights in all
(`layer_ops.py`). Kernels of the pool and all-reduces have no estimate, and the time that DMAs take is in none. The
batch is one of 64 sequences: a token each, or 512 in all. On a tpu7x an all-reduce is four operations.

It needs libtpu: outside an environment that has it, `scripts/aot_env.sh` makes one (``--env``) and the script runs
again there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from compiler_env import default_env, run_again_in
from layer_ops import layer_ops

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ROOT / "jpaged" / "planning" / "shapes"
FAMILIES = {"llama": "models.llama:Llama", "qwen3": "models.llama:Llama", "gemma3_text": "models.gemma:Gemma"}
"""Where a model type's module is: in an environment without jpaged no entry point says it."""
COLUMNS = (
    "device | model | step | operations | the same for all | copies | sorts | gathers | cycles | row kernels | products"
    " | compile s"
)
SEQS, CONTEXT, TOKENS, BLOCK = 64, 8192, 512, 128
POOL_BYTES = 2 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["v5e-8", "v6e-8", "v5p-16", "tpu7x-8"])
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b", "llama-3.3-70b", "gemma-3-27b", "qwen3-0.6b"])
    parser.add_argument("--steps", nargs="+", choices=["decode", "mixed"], default=["decode", "mixed"])
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each row instead")
    parser.add_argument("--hlo", type=Path, default=None, help="folder for the programs' texts")
    parser.add_argument("--env", type=Path, default=default_env("tpu"), help="environment with libtpu")
    options = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        run_again_in(options.env, "tpu")
    sys.path[:0] = [str(ROOT)]
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jpaged.planning.target_mesh import TPU_HOST

    os.environ.update(TPU_HOST)
    if not options.json:
        print(f"| {COLUMNS} |\n|" + "---|" * (1 + COLUMNS.count("|")))
    for device in options.devices:
        for model in options.models:
            for step in options.steps:
                start = time.perf_counter()
                text = getattr(step_programs(device, model), step)().compile().as_text()
                if options.hlo is not None:
                    options.hlo.mkdir(parents=True, exist_ok=True)
                    (options.hlo / f"{device}-{model}-{step}.txt").write_text(text)
                found = layer_ops(text)
                told = f"| {device} | {model} | {step} | {row(found)} | {time.perf_counter() - start:.0f} |"
                print(json.dumps({"device": device, "step": step} | found) if options.json else told, flush=True)


def row(found: dict[str, int]) -> str:
    """Return a table's row of what `layer_ops` found."""
    counts = (
        found[name]
        for name in ("operations", "the same for all layers", "copies", "sorts", "gathers", "cycles", "row kernels")
    )
    figures = " | ".join(f"{count:,}" for count in counts)
    return f"{figures} | {found['products'] / found['cycles']:.2f}"


def step_programs(device: str, model: str) -> Any:
    """Return the programs of an engine of a model on a device."""
    import jax.numpy as jnp
    from flax import nnx
    from transformers import AutoConfig

    from jpaged.execution import plan_pool
    from jpaged.execution.lowering import StepPrograms
    from jpaged.loading.build_context import build_context
    from jpaged.loading.parameters.targets import abstract_model
    from jpaged.loading.parameters.weights import abstract_params
    from jpaged.planning.devices import find_device
    from jpaged.planning.target_mesh import target_mesh

    mesh = target_mesh(find_device(device), compiled=True)
    shape = json.loads((SHAPES / f"{model}.json").read_text())
    config = AutoConfig.for_model(**shape)
    module, _, name = FAMILIES[config.model_type].partition(":")
    family = getattr(importlib.import_module(module), name)
    build = build_context(mesh, jnp.bfloat16, stacked=True, kernel_impl="tpu")
    made = abstract_model(family, config, build)
    return StepPrograms(
        graphdef=nnx.split(made)[0],
        params=abstract_params(made, mesh),
        spec=plan_pool(
            made.layer_groups,
            block_size=BLOCK,
            dtype=jnp.dtype(jnp.bfloat16),
            shards=mesh.size,
            pool_bytes=POOL_BYTES,
        ),
        mesh=mesh,
        max_num_seqs=SEQS,
        max_num_batched_tokens=TOKENS,
        max_model_len=CONTEXT,
        vocab_size=config.vocab_size,
        kernel_impl="tpu",
    )


if __name__ == "__main__":
    main()

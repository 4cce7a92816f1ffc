"""Counts the bytes that a decode step moves on NVIDIA GPUs, in the program that XLA's compiler makes for them.

    python scripts/gpu_step_bytes.py                                      T4, L4, A100 and H200 in float16
    python scripts/gpu_step_bytes.py --devices h200 --dtype bfloat16 --quantization int4

No GPU is needed, and nothing has been run on one. The model is some layers of a Llama-3.1-8B, the batch as many
sequences as the step has rows, each as long as its block table. A row of the table has the bytes of the layers' weights
and of the batch's KV, what the step moves by `hlo_bytes.py`, how many times their sum that is, and the operations of a
layer. The attention kernel's reads of the pool, which are not in the
program's text, count as the batch's KV once. Of the draw it has the bytes of logits and greedy choice against those of
the head.

It needs XLA's CUDA plugin: outside an environment that has it, `scripts/aot_env.sh` makes one (``--env``) and the
script runs again there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from compiler_env import default_env, run_again_in

ROOT = Path(__file__).resolve().parents[1]
SHAPE = ROOT / "jpaged" / "planning" / "shapes" / "llama-3.1-8b.json"
BLOCK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["t4", "l4", "a100", "h200"])
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--quantization", choices=["int8", "int4", "fp8"], default=None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each device instead")
    parser.add_argument("--hlo", type=Path, default=None, help="folder for the programs' texts")
    parser.add_argument("--env", type=Path, default=default_env("cuda"), help="environment with the plugin")
    options = parser.parse_args()
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        run_again_in(options.env, "cuda")
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    if not options.json:
        print(heading(options))
    for name in options.devices:
        found = count(name, options)
        print(json.dumps(found) if options.json else row(found), flush=True)


def count(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compile a device's decode step and draw, and return the bytes that they move, as plain data."""
    from hlo_bytes import largest_result, moved_bytes

    from jpaged.planning.devices import find_device
    from jpaged.planning.target_mesh import target_capability, target_mesh

    start = time.perf_counter()
    device = find_device(name)
    with target_capability(device):
        programs = step_programs(target_mesh(device, compiled=True), options)
        texts = {"step": programs.decode().compile().as_text(), "draw": programs.sampler(top=0).compile().as_text()}
    if options.hlo is not None:
        options.hlo.mkdir(parents=True, exist_ok=True)
        for program, text in texts.items():
            (options.hlo / f"{name}-{program}.txt").write_text(text)
    pool = programs.spec.device_bytes
    step, draw = moved_bytes(texts["step"], pool_bytes=pool), moved_bytes(texts["draw"])
    weights, head = parameter_bytes(programs.params)
    layout = programs.spec.layout
    token = layout.groups[0].block_bytes // BLOCK
    kv = token * options.seqs * options.context
    moved = step.total + kv + token * options.seqs  # the kernels read the batch's KV and write its new tokens'
    return {
        "device": name,
        "weights": weights,
        "kv": kv,
        "moved": moved,
        "ratio": moved / (weights + kv),
        "by kind": step.by_kind,
        "operations a layer": step.operations / options.layers,
        "loops": len(re.findall(r"[\s)}]while\(", texts["step"])),
        "largest result": largest_result(texts["step"], pool_bytes=pool),
        "head": head,
        "draw": draw.total,
        "draw by kind": draw.by_kind,
        "seconds": round(time.perf_counter() - start, 1),
    }


def step_programs(mesh: Any, options: argparse.Namespace) -> Any:
    """Return the programs of an engine with the layers, the batch and the pool that were asked for."""
    import jax.numpy as jnp
    from flax import nnx
    from transformers import LlamaConfig

    from jpaged.execution import plan_pool
    from jpaged.execution.lowering import StepPrograms
    from jpaged.loading.build_context import build_context
    from jpaged.loading.parameters.targets import abstract_model
    from jpaged.loading.parameters.weights import abstract_params
    from models.llama import Llama

    config = LlamaConfig(**json.loads(SHAPE.read_text()) | {"num_hidden_layers": options.layers})
    dtype = jnp.dtype(options.dtype)
    model = abstract_model(Llama, config, build_context(mesh, dtype, kernel_impl="gpu"))
    element = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    pool_bytes = element * options.layers * options.seqs * (options.context + BLOCK)
    return StepPrograms(
        graphdef=nnx.split(model)[0],
        params=abstract_params(model, mesh, quantization=options.quantization),
        spec=plan_pool(model.layer_groups, block_size=BLOCK, dtype=dtype, shards=1, pool_bytes=pool_bytes),
        mesh=mesh,
        max_num_seqs=options.seqs,
        max_num_batched_tokens=options.seqs,
        max_model_len=options.context,
        vocab_size=config.vocab_size,
        kernel_impl="gpu",
    )


def parameter_bytes(params: Any) -> tuple[int, int]:
    """Return the bytes of the layers' parameters, and of the vocabulary's head."""
    import jax

    found = {"layers": 0, "lm_head": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        for part in found:
            found[part] += leaf.size * leaf.dtype.itemsize if part in name else 0
    return found["layers"], found["lm_head"]


def heading(options: argparse.Namespace) -> str:
    """Return the table's first lines."""
    columns = (
        "device | weights, MB | KV, MB | moved, MB | times | operations a layer | draw, times the head | compiled in, s"
    )
    held = options.dtype if options.quantization is None else f"{options.quantization} and {options.dtype}"
    said = f"{options.layers} layers, {options.seqs} sequences of {options.context} tokens, {held}"
    return f"{said}\n\n| {columns} |\n|" + "---|" * (1 + columns.count("|"))


def row(found: dict[str, Any]) -> str:
    """Return a device's row of the table."""
    sizes = " | ".join(f"{found[name] / 1e6:,.0f}" for name in ("weights", "kv", "moved"))
    times = f"{found['ratio']:.3f} | {found['operations a layer']:.1f} | {found['draw'] / found['head']:.2f}"
    return f"| {found['device']} | {sizes} | {times} | {found['seconds']} |"


if __name__ == "__main__":
    main()

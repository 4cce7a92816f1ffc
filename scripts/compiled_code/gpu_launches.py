"""Counts what a decode step launches a layer on NVIDIA GPUs, and what XLA records in command buffers: no GPU is needed.

    python scripts/gpu_layer_launches.py                          H200, A100, L4 and T4 in float16
    python scripts/gpu_layer_launches.py --devices h200 --list    and what they are, one a line
    python scripts/gpu_layer_launches.py --calls recorded         launches of Triton that may be recorded

Nothing has been run on a GPU. The model is some layers of a Llama-3.1-8B, as in `gpu_step_bytes.py`. A layer's launches
are the operations of XLA's optimised program from one layer's first launch of Triton to the next layer's: each is a
kernel, or a library's call, which may launch several. A command buffer (CUDA graph) is launched at once; what stands
outside of them the host launches by itself, step by step. XLA takes operations that follow one another into one, from
five on (``xla_gpu_graph_min_graph_size``), if their kind is among those of ``xla_gpu_enable_command_buffer``, which by
default are fusions, cuBLAS, cuDNN and custom calls that say they may be recorded. Loops and collectives are not.

It needs XLA's CUDA plugin: outside an environment that has it, `scripts/aot_env.sh` makes one (``--env``) and the
script runs again there. ``XLA_FLAGS`` is obeyed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from compiler_env import default_env, run_again_in

ROOT = Path(__file__).resolve().parents[1]
THUNKS = "*jit_steps*.thunk_sequence_after_thunk_passes.txt"
COLUMNS = "device | launches a layer | what they are | launches a step | command buffers | launches outside of them"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["h200", "a100", "l4", "t4"])
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--quantization", choices=["int8", "int4", "fp8"], default=None)
    parser.add_argument("--layers", type=int, default=3, help="three or more; default: %(default)s")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--calls", choices=["default", "recorded", "plain"], default="default")
    parser.add_argument("--list", action="store_true", help="list a layer's launches")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each device instead")
    parser.add_argument("--env", type=Path, default=default_env("cuda"), help="environment with the plugin")
    options = parser.parse_args()
    if options.layers < 3:
        parser.error(f"--layers {options.layers}: one between the first and the last is counted; from 3 on")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        run_again_in(options.env, "cuda")
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    with tempfile.TemporaryDirectory() as dumps:
        os.environ["JAX_PLATFORMS"] = "cpu"
        if options.calls != "default":
            from pallas_kernels.gpu_capture import VARIABLE

            os.environ[VARIABLE] = str(int(options.calls == "recorded"))
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dumps}".strip()
        if not options.json:
            print(f"| {COLUMNS} |\n|" + "---|" * (1 + COLUMNS.count("|")))
        for name in options.devices:
            found = count(name, options, Path(dumps))
            print(json.dumps(found) if options.json else row(found, options.list), flush=True)


def count(name: str, options: argparse.Namespace, dumps: Path) -> dict[str, Any]:
    """Compile a device's decode step and return its launches, as plain data."""
    from gpu_step_bytes import step_programs

    from jpaged.planning.devices import find_device
    from jpaged.planning.target_mesh import target_capability, target_mesh

    for old in dumps.iterdir():
        old.unlink()
    device = find_device(name)
    with target_capability(device):
        text = step_programs(target_mesh(device, compiled=True), options).decode().compile().as_text()
    layer, step = launches_of_layer(text, options.layers)
    (thunks,) = dumps.glob(THUNKS)
    return {"device": name, "layer": layer, "step": step} | recorded(thunks.read_text())


def launches_of_layer(hlo: str, layers: int) -> tuple[list[str], int]:
    """Return what a layer in the middle launches, in order, and how many launches the step has."""
    from hlo_bytes import is_free, kind_of, parse

    computations, entry = parse(hlo)
    launches = [(kind_of(op), op.name) for op in computations[entry].values() if not is_free(op)]
    triton = [at for at, (kind, _) in enumerate(launches) if kind.startswith("triton_kernel_call")]
    each, rest = divmod(len(triton), layers)
    if rest or not each:
        raise ValueError(f"{len(triton)} launches of Triton are not the same number for each of {layers} layers")
    first, last = triton[each], triton[2 * each]
    return [f"{kind}: {name}" for kind, name in launches[first:last]], len(launches)


def recorded(thunks: str) -> dict[str, int]:
    """Return how many command buffers a program has, and how many launches outside of them.

    Args:
        thunks: XLA's dump of a program's thunks, a line each; those of a command buffer are indented.
    """
    lines = [line for line in thunks.splitlines() if line.strip()]
    buffers = sum("kCommandBuffer" in line for line in lines)
    return {"command buffers": buffers, "outside": sum(not line.startswith(" ") for line in lines) - buffers}


def row(found: dict[str, Any], lists: bool) -> str:
    """Return a device's row of the table."""
    kinds = Counter(launch.split(":")[0] for launch in found["layer"])
    said = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    figures = f"{found['step']} | {found['command buffers']} | {found['outside']}"
    line = f"| {found['device']} | {len(found['layer'])} | {said} | {figures} |"
    return "\n".join([line, *(f"    {launch}" for launch in found["layer"])]) if lists else line


if __name__ == "__main__":
    main()

"""Counts what a decode step launches a layer on NVIDIA GPUs, and what XLA records in command buffers."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from scripts.cases import Row
from scripts.compiled_code.compilers import empty, need_compiler
from scripts.compiled_code.gpu_bytes import Dtype, Quantization, llama_programs
from scripts.compiled_code.hlo_bytes import is_free, kind_of, parse

THUNKS = "*jit_steps*.thunk_sequence_after_thunk_passes.txt"


def launches(
    devices: list[str] = ["h200", "a100", "l4", "t4"],  # noqa: B006 (never changed)
    dtype: Dtype = "float16",
    quantization: Quantization | None = None,
    layers: int = 3,
    seqs: int = 64,
    context: int = 2048,
    calls: Literal["default", "recorded", "plain"] = "default",
) -> Iterator[Row]:
    """Launches of a layer in a decode step of some layers of a Llama-3.1-8B, and those that the host launches alone.

    A layer's launches are the operations of XLA's optimised program from one layer's first launch of Triton to the next
    layer's: each is a kernel, or a library's call, which may launch several. The JSON lists them. A command buffer
    (CUDA graph) is launched at once; the host launches each operation outside of them. XLA takes operations that follow
    one another into one, from five on (``xla_gpu_graph_min_graph_size``), if their kind is among those of
    ``xla_gpu_enable_command_buffer``: by default fusions, cuBLAS, cuDNN and custom calls that may be recorded. Loops
    and collectives are not. `calls` says whether launches of Triton may be recorded. ``XLA_FLAGS`` is obeyed. Nothing
    has run on a GPU.

    Raises:
        ValueError: fewer than three layers.
    """
    if layers < 3:
        raise ValueError(f"layers={layers}: a layer between the first and the last is counted, so it takes 3 or more")
    need_compiler("cuda")
    with tempfile.TemporaryDirectory() as folder:
        if calls != "default":
            from pallas_kernels.gpu_launch import VARIABLE

            os.environ[VARIABLE] = str(int(calls == "recorded"))
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}".strip()
        for name in devices:
            yield _count(name, dtype, quantization, layers, seqs, context, Path(folder))


def _count(name: str, dtype: str, quantization: str | None, layers: int, seqs: int, context: int, dumps: Path) -> Row:
    """Compile a device's decode step, and return its row."""
    from jpaged.planning.devices import find_device
    from jpaged.planning.target_mesh import target_capability, target_mesh

    empty(dumps)
    device = find_device(name)
    with target_capability(device):
        mesh = target_mesh(device, compiled=True)
        text = llama_programs(mesh, dtype, quantization, layers, seqs, context).decode().compile().as_text()
    layer, step = launches_of_layer(text, layers)
    (thunks,) = dumps.glob(THUNKS)
    kinds = Counter(launch.split(":")[0] for launch in layer)
    return {
        "device": name,
        "launches a layer": len(layer),
        "kinds": ", ".join(f"{number} {kind}" for kind, number in kinds.items()),
        "launches a step": step,
        **recorded(thunks.read_text()),
        "layer": layer,
    }


def launches_of_layer(hlo: str, layers: int) -> tuple[list[str], int]:
    """Return what a layer in the middle launches, in order, and how many launches the step has."""
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

"""Counts the bytes that a decode step moves on NVIDIA GPUs, in the program that XLA's compiler makes for them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from scripts.cases import Row
from scripts.compiled_code.compilers import need_compiler
from scripts.compiled_code.hlo_bytes import largest_result, moved_bytes
from scripts.compiled_code.programs import published_config, step_programs, write_text

MODEL, BLOCK = "llama-3.1-8b", 16
Dtype = Literal["float16", "bfloat16", "float32"]
Quantization = Literal["int8", "int4", "fp8"]


def step_bytes(
    devices: list[str] = ["t4", "l4", "a100", "h200"],  # noqa: B006 (never changed)
    dtype: Dtype = "float16",
    quantization: Quantization | None = None,
    layers: int = 4,
    seqs: int = 64,
    context: int = 2048,
    hlo: Path | None = None,
) -> Iterator[Row]:
    """Bytes that a decode step of some layers of a Llama-3.1-8B moves, as a multiple of weights and KV.

    The batch has `seqs` sequences, each as long as its block table. A row has the bytes of the layers' weights and of
    the batch's KV; those that the step moves by `hlo_bytes`; how many times their sum that is; the operations of a
    layer; and the bytes of logits and greedy choice as a multiple of the head's. The program's text does not have the
    attention kernel's reads of the pool, so these count as the batch's KV once. Nothing has run on a GPU. The JSON has
    the bytes by kind of operation. `hlo` is a folder for the programs' texts."""
    need_compiler("cuda")
    for name in devices:
        yield _count(name, dtype, quantization, layers, seqs, context, hlo)


def _count(
    name: str, dtype: str, quantization: str | None, layers: int, seqs: int, context: int, hlo: Path | None
) -> Row:
    """Compile a device's decode step and draw, and return its row."""
    from jpaged.planning.devices import find_device
    from jpaged.planning.target_mesh import target_capability, target_mesh

    start = time.perf_counter()
    device = find_device(name)
    with target_capability(device):
        mesh = target_mesh(device, compiled=True)
        programs = llama_programs(mesh, dtype, quantization, layers, seqs, context)
        texts = {"step": programs.decode().compile().as_text(), "draw": programs.sampler(top=0).compile().as_text()}
    for program, text in texts.items():
        write_text(hlo, f"{name}-{program}", text)
    pool = programs.spec.device_bytes
    step, draw = moved_bytes(texts["step"], pool_bytes=pool), moved_bytes(texts["draw"])
    weights, head = _parameter_bytes(programs.params)
    token = programs.spec.layout.groups[0].block_bytes // BLOCK
    kv = token * seqs * context
    moved = step.total + kv + token * seqs  # the kernels read the batch's KV and write that of its new tokens
    return {
        "device": name,
        "weights, MB": weights / 1e6,
        "KV, MB": kv / 1e6,
        "moved, MB": moved / 1e6,
        "times": moved / (weights + kv),
        "operations a layer": step.operations / layers,
        "draw, MB": draw.total / 1e6,
        "draw, times the head": draw.total / head,
        "loops": len(re.findall(r"[\s)}]while\(", texts["step"])),
        "largest result, MB": largest_result(texts["step"], pool_bytes=pool) / 1e6,
        "by kind": step.by_kind,
        "draw by kind": draw.by_kind,
        "compile s": round(time.perf_counter() - start, 1),
    }


def llama_programs(
    mesh: Any, dtype: str, quantization: str | None, layers: int, seqs: int, context: int, tokens: int | None = None
) -> Any:
    """Return the programs of some layers of a Llama-3.1-8B, whose pool holds a block more than each sequence needs.

    Args:
        tokens: most tokens of a step; None = one a sequence.
    """
    import jax.numpy as jnp

    config = published_config(MODEL, num_hidden_layers=layers)
    element = 2 * config.num_key_value_heads * config.head_dim * jnp.dtype(dtype).itemsize
    return step_programs(
        config,
        mesh,
        dtype=dtype,
        stacked=False,
        kernel_impl="gpu",
        block_size=BLOCK,
        pool_bytes=element * layers * seqs * (context + BLOCK),
        seqs=seqs,
        tokens=tokens or seqs,
        context=context,
        quantization=quantization,
    )


def _parameter_bytes(params: Any) -> tuple[int, int]:
    """Return the bytes of the layers' parameters, and of the vocabulary's head."""
    import jax

    found = {"layers": 0, "lm_head": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        for part in found:
            found[part] += leaf.size * leaf.dtype.itemsize if part in name else 0
    return found["layers"], found["lm_head"]

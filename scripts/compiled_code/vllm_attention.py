"""Compiles vLLM's ``kernel_unified_attention`` for GPUs that are not there. Runs in vLLM's environment (0.33; the core
alone does: neither its compiled part nor a GPU is needed).

Reads cases as lines of JSON from standard input and answers each with a line: what `compile_case` returns, or
{"error": ...}. The launch is the one that vLLM's ``unified_attention`` makes, as its Triton backend calls it.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with an empty list vLLM keeps Triton where no GPU is found
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from vllm.v1.attention.ops import triton_unified_attention as unified
from vllm.v1.kv_cache_interface import KVQuantMode

SEGMENTS, THRESHOLD = 16, 128
"""Parts of a decode and query blocks up to which decodes are parted, as the backend has them without a GPU's graphs."""
FLOAT8 = torch.float8_e4m3fn


class Absent:
    """A driver of Triton for one GPU that is not there."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Compiled:
    """Stands for a kernel: compiles the launch that it is called for, and keeps what came of it."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.found: Any = None
        self.given: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**given: Any) -> None:
            self.given = given
            self.found = self.kernel.warmup(grid=grid, **given)

        return launch


def compile_case(case: dict[str, Any]) -> dict[str, Any]:
    """Return the cubin of attention, base64, with its warps, shared memory and keys and rows of a turn.

    `case` has capability, seqs, queries of each, context, kv_heads, group, head_dim, block_size, dtype, kv_dtype
    (None = dtype, "int8" or "fp8"), window and soft_cap (0 = none).
    """
    driver.set_active(Absent(case["capability"]))
    unified.current_platform.is_device_capability_family = lambda family: case["capability"] // 10 * 10 == family
    dtype, seqs, queries = getattr(torch, case["dtype"]), case["seqs"], case["queries"]
    heads, width = case["kv_heads"] * case["group"], case["head_dim"]
    quant, held, scales = KVQuantMode.NONE, dtype, {}
    if case["kv_dtype"] is not None:
        held = {"int8": torch.int8, "fp8": FLOAT8}[case["kv_dtype"]]
        quant = {"int8": KVQuantMode.INT8_PER_TOKEN_HEAD, "fp8": KVQuantMode.FP8_PER_TENSOR}[case["kv_dtype"]]
    kv = [torch.empty(64, case["block_size"], case["kv_heads"], width, dtype=held) for _ in range(2)]
    if case["kv_dtype"] == "int8":
        scales = {f"{name}_scale_cache": torch.empty(kv[0].shape[:3]) for name in "kv"}
    one = torch.ones(seqs, case["kv_heads"]) if quant == KVQuantMode.FP8_PER_TENSOR else None
    q = torch.empty(seqs * queries, heads, width, dtype=dtype)
    parts = (len(q), heads, SEGMENTS)
    padded = 1 << (width - 1).bit_length()
    attention = Compiled(ATTENTION)
    unified.kernel_unified_attention, unified.reduce_segments = attention, Compiled(JOIN)
    unified.unified_attention(
        q,
        *kv,
        torch.empty_like(q),
        torch.arange(seqs + 1, dtype=torch.int32),
        queries,
        torch.full((seqs,), case["context"], dtype=torch.int32),
        case["context"],
        width**-0.5,
        True,
        (case["window"] - 1, 0) if case["window"] else (-1, -1),
        torch.zeros(seqs, -(-case["context"] // case["block_size"]), dtype=torch.int32),
        case["soft_cap"],
        None,
        one,
        one,
        seq_threshold_3D=THRESHOLD,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=torch.empty(*parts, padded),
        softmax_segm_max=torch.empty(parts),
        softmax_segm_expsum=torch.empty(parts),
        kv_quant_mode=quant,
        **scales,
    )
    made, given = attention.found, attention.given
    return {
        "cubin": base64.b64encode(made.asm["cubin"]).decode(),
        "shared": made.metadata.shared,
        "warps": made.metadata.num_warps,
        "stages": made.metadata.num_stages,
        "keys": given["TILE_SIZE"],
        "rows": given["BLOCK_M"],
    }


ATTENTION, JOIN = unified.kernel_unified_attention, unified.reduce_segments


def main() -> None:
    """Answer each line of standard input."""
    for line in sys.stdin:
        try:
            answer = compile_case(json.loads(line))
        except Exception as error:  # a compiler raises anything; a row that is missing would hide it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""Compile the Triton kernels for GPUs that are not there and print what each takes of one, as JSON.

Run by `test_aot_gpu_kernels.py` inside the environment with Triton; one kernel a line. Arguments are a target and
shapes; without any all are compiled for all targets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_copy.gpu import block_copy
from pallas_kernels.gpu_launch import compiling_for
from pallas_kernels.kv_write.gpu import kv_write
from pallas_kernels.layout import view_shape
from pallas_kernels.matmul.gpu_grouped import matmul_grouped
from pallas_kernels.paged_attention.gpu import paged_attention
from pallas_kernels.paged_attention.reference import AttentionCall
from pallas_kernels.quantised import E2M1_PAIRS, INT8, UINT4_PAIRS, QuantisedMatrix
from pallas_kernels.quantised_matmul.gpu import multiply_held, multiply_held_groups
from pallas_kernels.rotated_heads import HeadNorms
from pallas_kernels.rotated_heads.gpu import rotated_heads
from scripts.compiled_code.triton_compiler import Compiler

BLOCKS, SEQS, PAGES, TOKENS = 20_000, 64, 512, 256


class Shape(NamedTuple):
    """A model's heads; `kv_dtype`: what KV is held in, None = dtype; `images`: whether tokens see all of theirs."""

    kv_heads: int
    group: int
    head_dim: int
    layers: int
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    limits: Mapping[str, Any] = MappingProxyType({})
    kv_dtype: Any = None
    images: bool = False


SHAPES = {
    "Llama-3.1-8B": Shape(8, 4, 128, 32),
    "Llama-3.3-70B x8": Shape(1, 8, 128, 80, block_size=128),
    "Gemma-2-9B": Shape(8, 2, 256, 21, limits={"sliding_window": 4096, "soft_cap": 50.0}),
    "OPT-125m, float32": Shape(12, 1, 64, 12, dtype=jnp.float32),
    "Llama-4-Scout": Shape(8, 5, 128, 36, block_size=32, limits={"chunk_size": 8192}),
    "GPT-OSS-20B": Shape(8, 8, 64, 12, limits={"sliding_window": 128}),
    "Llama heads, float32": Shape(8, 4, 128, 32, dtype=jnp.float32),
    "Llama-3.1-8B, int8 KV": Shape(8, 4, 128, 32, kv_dtype=jnp.int8),
    "Llama-3.1-8B, fp8 KV": Shape(8, 4, 128, 32, kv_dtype=jnp.uint8),
    "Gemma-3-4B, images": Shape(4, 2, 256, 29, limits={"sliding_window": 1024}, images=True),
    "Gemma-2-9B, int8 KV": Shape(8, 2, 256, 21, limits={"soft_cap": 50.0}, kv_dtype=jnp.int8),
    "Llama-3.1-8B, float16": Shape(8, 4, 128, 32, dtype=jnp.float16),
    "Gemma-2-9B, float16": Shape(8, 2, 256, 21, dtype=jnp.float16, limits={"soft_cap": 50.0}),
    "Llama-3.1-8B, float16, int8 KV": Shape(8, 4, 128, 32, dtype=jnp.float16, kv_dtype=jnp.int8),
}
TARGETS = {
    75: ("Llama-3.1-8B, float16", "Gemma-2-9B, float16", "Llama-3.1-8B, float16, int8 KV"),
    80: (
        "Llama-3.1-8B",
        "Llama-3.1-8B, float16",
        "Gemma-2-9B",
        "Gemma-3-4B, images",
        "OPT-125m, float32",
        "Llama-3.1-8B, fp8 KV",
        "Gemma-2-9B, int8 KV",
    ),
    90: tuple(name for name in SHAPES if "float16" not in name),
    100: ("Llama-3.1-8B", "Gemma-2-9B", "OPT-125m, float32", "Llama-3.1-8B, int8 KV"),
}


def rotated(compiler: Compiler, joined: jax.Array, cos: jax.Array, sin: jax.Array, *scales: jax.Array) -> Any:
    """Heads rotated, and normed before if there are scales of norms."""
    norms = HeadNorms(scales[0], scales[1], eps=1e-6) if scales else None
    return rotated_heads(joined, cos, sin, norms, launch=compiler)


def compile_all(capability: int, shape: Shape) -> dict[str, dict[str, int]]:
    """Compile each kernel at a model's shapes and return what it takes."""
    compiler = Compiler(capability)
    kv_heads, group, head_dim, layers, block_size, dtype, limits, kv_dtype, images = shape
    held = kv_dtype or dtype

    def array(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    view = array(*view_shape(BLOCKS, layers, kv_heads, head_dim, block_size, held), dtype=held)
    q = array(TOKENS, kv_heads, group, head_dim, dtype=dtype)
    kv = array(TOKENS, kv_heads, head_dim, dtype=dtype)

    def attend(*arrays, **last):
        return paged_attention(AttentionCall(*arrays, head_dim**-0.5, **limits, **last), launch=compiler)

    with compiling_for(capability):
        last = {"last_keys": array(TOKENS)} if images else {}
        jax.eval_shape(attend, q, view, array(), array(SEQS, PAGES), array(SEQS + 1), array(SEQS), **last)
        jax.eval_shape(partial(kv_write, launch=compiler), view, array(), kv, kv, array(TOKENS))
        joined, angles = array(TOKENS, kv_heads, group + 2, head_dim, dtype=dtype), (TOKENS, head_dim // 2)
        tables = tuple(array(*angles, dtype=jnp.float32) for _ in range(2))
        scale = array(head_dim, dtype=dtype)
        for scales in ((), (scale, scale)):
            jax.eval_shape(partial(rotated, compiler), joined, *tables, *scales)
        jax.eval_shape(partial(block_copy, launch=compiler), view, array(SEQS), array(SEQS))
    return compiler.kernels


EXPERTS = {
    "Mixtral-8x7B": (8, 4096, 28672, jnp.bfloat16),
    "Mixtral-8x7B, float16": (8, 4096, 28672, jnp.float16),
    "Qwen3-30B-A3B, float32": (128, 2048, 1536, jnp.float32),
}
"""Experts, width of what they take, columns of the first product, dtype."""
CODES = {
    "Llama-3.1-8B up, int4": (4096, 28672, 32, jnp.uint8),
    "Llama-3.1-8B out, int8": (4096, 4096, 4096, jnp.int8),
}
"""Inputs, outputs, values of a group, dtype of the codes."""
HALF_ONLY = 75
"""A target that multiplies float16 only."""


def compile_experts(
    capability: int, tokens: int, experts: int, inputs: int, outputs: int, dtype: Any
) -> dict[str, Any]:
    """Compile the products of `tokens` rows with experts and return what they take."""
    compiler = Compiler(capability)
    arrays = ((tokens, inputs), dtype), ((experts, inputs, outputs), dtype), ((experts,), jnp.int32)
    jax.eval_shape(partial(matmul_grouped, launch=compiler), *(jax.ShapeDtypeStruct(*array) for array in arrays))
    return compiler.kernels


def compile_products(capability: int, rows: int, inputs: int, outputs: int, group: int, held: Any) -> dict[str, Any]:
    """Compile the product of some rows with codes and return what it takes."""
    compiler = Compiler(capability)
    dtype = jnp.float16 if capability == HALF_ONLY else jnp.bfloat16
    scales = jax.ShapeDtypeStruct((inputs // group, outputs), jnp.float16)
    packed = held == jnp.uint8
    codes = jax.ShapeDtypeStruct((inputs // (1 + packed), outputs), held)
    multiply = partial(multiply_held, out_dtype=dtype, launch=compiler)
    x = jax.ShapeDtypeStruct((rows, inputs), dtype)
    jax.eval_shape(
        multiply, x, QuantisedMatrix(codes, scales, scales if packed else None, codec=UINT4_PAIRS if packed else INT8)
    )
    return compiler.kernels


def compile_expert_codes(capability: int, experts: int, inputs: int, outputs: int) -> dict[str, Any]:
    """Compile products of some rows with experts in MXFP4 and return what they take."""
    compiler = Compiler(capability)
    dtype = jnp.float16 if capability == HALF_ONLY else jnp.bfloat16
    codes, scales = (jax.ShapeDtypeStruct((experts, inputs // n, outputs), jnp.uint8) for n in (2, 32))
    x, counts = jax.ShapeDtypeStruct((256, inputs), dtype), jax.ShapeDtypeStruct((experts,), jnp.int32)
    multiply = partial(multiply_held_groups, launch=compiler)
    jax.eval_shape(multiply, x, QuantisedMatrix(codes, scales, codec=E2M1_PAIRS), counts)
    return compiler.kernels


def main(target: str = "", *shapes: str) -> None:
    for capability, names in {int(target): shapes}.items() if target else TARGETS.items():
        with compiling_for(capability):
            report_products(capability)
        for name in names:
            report(capability, name, compile_all(capability, SHAPES[name]))


def report_products(capability: int) -> None:
    """Print what the products of a GPU take."""
    report(capability, "GPT-OSS-20B, MXFP4", compile_expert_codes(capability, 32, 2880, 5760))
    for name, codes in CODES.items():
        for rows in (1, 64):
            report(capability, name, compile_products(capability, rows, *codes))
    for name, experts in EXPERTS.items():
        if (capability == HALF_ONLY) == (experts[-1] == jnp.float16):
            for tokens in (64, 8192):
                report(capability, name, compile_experts(capability, tokens, *experts))


def report(capability: int, shape: str, kernels: dict[str, dict[str, int]]) -> None:
    """Print what kernels take."""
    for kernel, needs in kernels.items():
        print(json.dumps({"target": capability, "shape": shape, "kernel": kernel} | needs), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

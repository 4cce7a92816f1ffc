"""Counts the machine instructions of paged attention on NVIDIA GPUs, vLLM's Triton kernel and jpaged's."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler

PEER = Path(__file__).with_name("vllm_attention.py")
SEQS, CONTEXT, QUERIES, BLOCKS, LAYERS = 64, 4096, 512, 4096, 8
Kind = Literal["decode", "prefill"]


@dataclass(frozen=True)
class Heads:
    """A model's heads of attention; 0 as window or soft cap is none, `kv_dtype` None is `dtype`."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: Literal["int8", "fp8"] | None = None
    window: int = 0
    soft_cap: float = 0.0


SHAPES = {
    "Llama-3.1-8B": Heads(8, 4, 128),
    "Llama-3.1-8B, float16": Heads(8, 4, 128, dtype="float16"),
    "Llama-3.3-70B x8": Heads(1, 8, 128),
    "Qwen3-8B, blocks of 128": Heads(8, 4, 128, block_size=128),
    "GPT-OSS-20B": Heads(8, 8, 64, window=128),
    "Gemma-2-9B": Heads(8, 2, 256, window=4096, soft_cap=50.0),
    "Gemma-3-27B": Heads(16, 2, 128, window=1024),
    "Llama-3.1-8B, int8 KV": Heads(8, 4, 128, kv_dtype="int8"),
    "Llama-3.1-8B, fp8 KV": Heads(8, 4, 128, kv_dtype="fp8"),
}
ON_75 = ("Llama-3.1-8B, float16",)


def gpu_peers(
    env: Path,
    capabilities: list[int] = [75, 80, 89, 90, 100],  # noqa: B006 (never changed)
    shapes: list[str] | None = None,
    kinds: list[Kind] = ["decode", "prefill"],  # noqa: B006
) -> Iterator[Row]:
    """Instructions, registers and occupancy of paged attention: vLLM's ``kernel_unified_attention`` and jpaged's.

    ENV has vLLM 0.33 and Triton 3.9 (``scripts/benchmarks/peer_engines/environment.sh vllm-core ENV``); both are
    compiled by the same Triton for the same batch, decodes of 64 sequences of 4,096 tokens or prompts of 512 after so
    many. A row has, of each kernel, the registers of a thread, bytes spilled, the share of a multiprocessor's warps
    that run at once, and the instructions that warps issue in the main loop for each KiB of KV that it reads, matrix
    products among them; of prompts, for each KiB and 100 rows of queries. The ratio is vLLM's over jpaged's, above 1
    where jpaged takes fewer. On sm_75 only float16 is compiled. Nothing has run on a GPU.
    """
    need_compiler("cuda")
    peer = subprocess.Popen([env / "bin" / "python", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with peer:
        for capability in capabilities:
            for name, heads in chosen("shapes", shapes or list(SHAPES), SHAPES).items():
                if capability == 75 and name not in ON_75:
                    continue
                for kind in kinds:
                    start = time.perf_counter()
                    row: Row = {"capability": capability, "shape": name, "kind": kind}
                    row |= _row(_of_vllm(peer, capability, heads, kind), _of_jpaged(capability, heads, kind), kind)
                    yield row | {"seconds": round(time.perf_counter() - start)}
        peer.stdin.close()


def _of_vllm(peer: Any, capability: int, heads: Heads, kind: Kind) -> dict[str, Any]:
    """Return what vLLM's kernel takes: see `_counted`."""
    case = asdict(heads) | {"capability": capability, "seqs": SEQS if kind == "decode" else 4, "context": CONTEXT}
    print(json.dumps(case | {"queries": 1 if kind == "decode" else QUERIES}), file=peer.stdin, flush=True)
    answer = json.loads(peer.stdout.readline())
    if "error" in answer:
        return answer
    return _counted(capability, heads, base64.b64decode(answer.pop("cubin")), **answer)


def _of_jpaged(capability: int, heads: Heads, kind: Kind) -> dict[str, Any]:
    """Return what our kernel takes: see `_counted`."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.gpu_launch import compiling_for
    from pallas_kernels.layout import view_shape
    from pallas_kernels.paged_attention.gpu import paged_attention
    from pallas_kernels.paged_attention.reference import AttentionCall
    from scripts.compiled_code.triton_compiler import Compiler

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    seqs, queries = (SEQS, 1) if kind == "decode" else (4, QUERIES)
    dtype = jnp.dtype(heads.dtype)
    held = {None: dtype, "int8": jnp.int8, "fp8": jnp.uint8}[heads.kv_dtype]
    shape = view_shape(BLOCKS, LAYERS, heads.kv_heads, heads.head_dim, heads.block_size, held)
    q = array(seqs * queries, heads.kv_heads, heads.group, heads.head_dim, dtype=dtype)
    tables = array(seqs, CONTEXT // heads.block_size)
    limits = {"sliding_window": heads.window or None, "soft_cap": heads.soft_cap or None, "max_query_len": queries}
    compiler = Compiler(capability)

    def attend(*arrays):
        return paged_attention(AttentionCall(*arrays, heads.head_dim**-0.5, **limits), launch=compiler)

    with compiling_for(capability):
        jax.eval_shape(attend, q, array(*shape, dtype=held), array(), tables, array(seqs + 1), array(seqs))
    name = "attend_to_units" if kind == "decode" else "attend_to_tiles"
    launch, cubin = compiler.made[name]
    takes = {"warps": launch.num_warps, "stages": launch.num_stages, "shared": compiler.kernels[name]["shared"]}
    return _counted(capability, heads, cubin, **takes, keys=launch.constants["KEYS"], rows=launch.constants["ROWS"])


def _counted(capability: int, heads: Heads, cubin: bytes, **takes: int) -> dict[str, Any]:
    """Return what a kernel takes; the main loop's instructions are for each KiB of K and V."""
    from scripts.compiled_code.sass import MATRIX, MULTIPROCESSORS, disassemble, main_loop, resources

    itemsize = 2 if heads.kv_dtype is None else 1
    loop, found = main_loop(disassemble(cubin)), resources(cubin)
    kib = 2 * takes["keys"] * heads.head_dim * itemsize / 1024
    place = {"registers": found["registers"], "shared": takes["shared"], "warps": takes["warps"]}
    return (
        takes
        | found
        | {
            "occupancy": MULTIPROCESSORS[capability].occupancy(**place),
            "instructions": loop.total() * takes["warps"] / kib,
            "matrix": sum(loop[name] for name in MATRIX) * takes["warps"] / kib,
            "loop": dict(loop.most_common()),
        }
    )


def _row(theirs: dict[str, Any], ours: dict[str, Any], kind: Kind) -> Row:
    """Return the rest of a row."""
    row: Row = {}
    for name, found in (("vLLM", theirs), ("jpaged", ours)):
        if "error" in found:
            return {"why not": found["error"][:200]}
        tile = f"{found['rows']} x {found['keys']}, {found['warps']} warps, {found['stages']} stages"
        row |= {f"{name}: tile": tile, f"{name}: registers": found["registers"], f"{name}: spilled": found["spilled"]}
        row |= {f"{name}: shared, KiB": found["shared"] / 1024, f"{name}: occupancy": found["occupancy"]}
        row |= {f"{name}: {what}": found[what] for what in ("instructions", "matrix", "loop")}
        if kind == "prefill":
            row |= {f"{name}: {what}": 100 * found[what] / found["rows"] for what in ("instructions", "matrix")}
    return row | {"ratio": row["vLLM: instructions"] / row["jpaged: instructions"]}

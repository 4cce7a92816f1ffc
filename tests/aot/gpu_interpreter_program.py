"""Run the Triton kernels by Triton's interpreter and print how far each result is from the reference, as JSON.

Run by `test_aot_gpu_kernels.py` inside the environment with Triton; one case a line. Arguments are names of cases, and
without any all are run. Needs no GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import chain

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

import jax.numpy as jnp
import numpy as np
from code_products import expert_errors, product_errors
from float8_kernels import wrong_codes, wrong_values
from one_byte_batches import in_bytes
from ragged_cases import Case, cast, dense_attention, last_keys_of_images, make_batch
from rotated_cases import rotation_errors
from triton_interpreter import interpret

from pallas_kernels.block_copy import gpu as block_copy
from pallas_kernels.block_copy import reference as block_copy_reference
from pallas_kernels.gpu_launch import compiling_for
from pallas_kernels.kv_write import gpu as gpu_write
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layout import view_shape
from pallas_kernels.matmul import gpu_grouped
from pallas_kernels.paged_attention import gpu as attention_gpu
from pallas_kernels.paged_attention import gpu_shapes
from pallas_kernels.paged_attention import reference as attention_reference
from pallas_kernels.paged_attention.reference import AttentionCall

gpu_shapes.MIN_UNIT = 64  # so that short contexts have several units
gpu_shapes.JOINED = 4

LONG = {"tokens": 4, "seqs": 4, "max_query_len": 1}
CASES = {
    "llama heads": Case(q_per_kv=4),
    "decode only, units of several sequences": Case(**LONG, q_per_kv=7, dtype="bfloat16"),
    "decode only, soft cap and window": Case(**LONG, soft_cap=5.0, sliding_window=40),
    "decode only, chunks": Case(**LONG, chunk_size=150),
    "one query head a KV head, packed rows": Case(head_dim=64, kv_heads=3, q_per_kv=1),
    "padded packed rows, bfloat16": Case(head_dim=48, dtype="bfloat16"),
    "padded rows": Case(head_dim=80),
    "two lane tiles, soft cap and window, bfloat16": Case(
        head_dim=256, dtype="bfloat16", soft_cap=5.0, sliding_window=40
    ),
    "window shorter than a block, odd group": Case(q_per_kv=3, sliding_window=5),
    "sinks and a window, odd group": Case(q_per_kv=3, sliding_window=40, sinks=True),
    "decode only, sinks": Case(**LONG, q_per_kv=3, head_dim=64, sinks=True),
    "blocks of 8": Case(block_size=8, pages=24, sliding_window=70),
    "blocks of 24": Case(block_size=24, pages=12),
    "chunks shorter than a block": Case(q_per_kv=3, chunk_size=11),
    "several tiles of queries": Case(tokens=80, q_per_kv=4, dtype="bfloat16", block_size=32, pages=8),
    "decode only, odd group, float16": Case(**LONG, q_per_kv=7, dtype="float16"),
    "two lane tiles, soft cap and window, float16": Case(
        head_dim=256, dtype="float16", soft_cap=5.0, sliding_window=40
    ),
    "several tiles of queries, float16": Case(tokens=80, q_per_kv=4, dtype="float16", block_size=32, pages=8),
}
WITH_IMAGES = {
    "images": Case(q_per_kv=4, tokens=96),
    "images, a shorter window, odd group": Case(q_per_kv=3, tokens=96, sliding_window=5),
    "images, two lane tiles, window, bfloat16": Case(head_dim=256, tokens=96, dtype="bfloat16", sliding_window=70),
}
IN_BYTES = {
    "llama heads": Case(q_per_kv=4),
    "padded packed rows, sinks": Case(head_dim=48, q_per_kv=3, sinks=True),
    "decode only, two rows of scales a block": Case(**LONG, block_size=40, pages=8, head_dim=64, kv_heads=3),
    "decode only, window, bfloat16": Case(**LONG, q_per_kv=7, sliding_window=40, dtype="bfloat16"),
    "two lane tiles, soft cap, bfloat16": Case(head_dim=256, dtype="bfloat16", soft_cap=5.0),
    "decode only, window, float16": Case(**LONG, q_per_kv=7, sliding_window=40, dtype="float16"),
}
BY_INSTRUCTIONS = ("padded packed rows, sinks", "decode only, window, bfloat16")
WITHOUT_MATRIX_UNITS = ("decode only, odd group, float16", "several tiles of queries, float16")


def ragged(case: Case, random: np.random.Generator) -> tuple[list[int], list[int]]:
    """(query lengths, tokens cached before them) that fill most of a batch; decodes, prefills, and none."""
    room = case.pages * case.block_size
    queries: list[int] = []
    for _ in range(case.seqs):
        left = case.tokens - sum(queries)
        most = min(case.max_query_len or left, left)
        queries.append(int(random.choice([min(1, most), most, random.integers(0, most + 1)])))
    return queries, [int(random.integers(0, room - n + 1)) for n in queries]


def chosen(name: str) -> bool:
    """Return whether a case is to be run."""
    return len(sys.argv) == 1 or name in sys.argv[1:]


def attention_errors(
    cases: dict[str, Case], held_in: str | None = None, prefix: str = ""
) -> Iterator[tuple[str, float]]:
    """Largest absolute difference to dense float64 attention of each case; K and V held in their dtype, or in bytes."""
    for name, case in cases.items():
        if not chosen(prefix + name):
            continue
        batch = make_batch(case, *ragged(case, np.random.default_rng(len(name))), seed=len(name))
        batch = in_bytes(case, batch, held_in) if held_in else batch
        arrays = map(jnp.asarray, batch.arrays)
        got = attention_gpu.paged_attention(AttentionCall(*arrays, **case.options), launch=interpret)
        assert got.dtype == batch.q.dtype
        yield prefix + name, float(np.abs(np.asarray(got, np.float64) - dense_attention(case, batch)).max())


def errors_with_images() -> Iterator[tuple[str, float]]:
    """Largest absolute difference where tokens of images see all of theirs: in the middle of a prompt, two of them, and
    beside a decode."""
    for name, case in WITH_IMAGES.items():
        if not chosen(name):
            continue
        batch = make_batch(case, [60, 1, 33], [130, 70, 0])
        last = last_keys_of_images(case, batch, [[3, 40, 41, 60], [], [0, 30]])
        arrays = map(jnp.asarray, batch.arrays)
        call = AttentionCall(*arrays, **case.options, last_keys=jnp.asarray(last))
        got = attention_gpu.paged_attention(call, launch=interpret)
        yield name, float(np.abs(np.asarray(got, np.float64) - dense_attention(case, batch, last)).max())


def id_out_of_range_error() -> float:
    """Difference to the reference when pages that queries see name no block."""
    case = Case(dtype="bfloat16")
    batch = make_batch(case, [1, 9], [47, 60])
    batch.block_tables[0, 1] = case.blocks
    batch.block_tables[1, 2] = -1
    call = AttentionCall(*map(jnp.asarray, batch.arrays), **case.options)
    got, want = attention_gpu.paged_attention(call, launch=interpret), attention_reference.paged_attention(call)
    return float(np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)).max())


def writes_differ(head_dim: int, kv_heads: int, block_size: int, dtype: str) -> float:
    """Elements of the view that differ from the reference's, tokens written in any order, some nowhere."""
    random = np.random.default_rng(head_dim)
    shape = view_shape(5, 3, kv_heads, head_dim, block_size, dtype)
    view = cast(random.integers(0, 100, shape) if dtype in ("int8", "uint8") else random.normal(size=shape), dtype)
    k, v = random.normal(size=(2, 9, kv_heads, head_dim)).astype(np.float32)
    k[7], v[8] = 0, v[8] * 1e4
    slots = random.permutation(5 * block_size)[:9].astype(np.int32)
    slots[[2, 5]] = [-1, 5 * block_size]
    arguments = [jnp.asarray(x) for x in (view, 1, k, v, slots)]
    got = gpu_write.kv_write(*arguments, launch=interpret)
    return float(np.sum(np.asarray(got) != np.asarray(kv_write(*arguments, impl="reference"))))


def copies_differ(dtype: str, shape: tuple[int, ...], src: list[int], dst: list[int]) -> float:
    """Elements that differ from the reference's."""
    random = np.random.default_rng(0)
    blocks = jnp.asarray(random.integers(-100, 100, size=shape), dtype)
    arguments = blocks, jnp.asarray(src), jnp.asarray(dst)
    got = block_copy.block_copy(*arguments, launch=interpret)
    return float(np.sum(np.asarray(got) != np.asarray(block_copy_reference.block_copy(*arguments))))


EXPERT_COUNTS = {
    "experts": [40, 0, 3, 90, 17],
    "experts, none of them twice": [1, 1, 0, 1, 1],
    "no rows of experts": [0, 0, 0, 0, 0],
    "more experts than rows": [0] * 30 + [2, 0, 1],
}
"""How many rows each expert has; three rows of no expert follow."""


def experts_errors(name: str, counts: list[int], dtype: str) -> float:
    """Largest difference to products in float64, of rows and matrices that fill no tile."""
    random = np.random.default_rng(len(name))
    x = cast(random.normal(size=(sum(counts) + 3, 75)) / 9, dtype)
    table = cast(random.normal(size=(len(counts), 75, 140)), dtype)
    got = gpu_grouped.matmul_grouped(*map(jnp.asarray, (x, table, np.asarray(counts))), launch=interpret)
    expert = np.repeat(np.arange(len(counts)), counts)
    want = np.zeros((len(x), 140))
    want[: len(expert)] = np.einsum("ri,rio->ro", x[: len(expert)].astype(float), table[expert].astype(float))
    return float(np.abs(np.asarray(got, np.float64) - want).max())


def main() -> None:
    def report(name: str, error: float) -> None:
        print(json.dumps({"name": name, "error": None if np.isnan(error) else error}), flush=True)

    def experts(name: str, dtype: str, prefix: str = "") -> None:
        full = f"{prefix}{name}" + ("" if dtype == "float32" else f", {dtype}")
        if chosen(full):
            report(full, experts_errors(name, EXPERT_COUNTS[name], dtype))

    def writes(name: str, *sizes: int, dtype: str) -> None:
        if chosen(name):
            report(name, writes_differ(*sizes, dtype))

    for name, error in attention_errors(CASES):
        report(name, error)
    for name in EXPERT_COUNTS:
        for dtype in ("float32", "bfloat16", "float16"):
            experts(name, dtype)
    for name, error in chain(product_errors(chosen), expert_errors(chosen), rotation_errors(chosen)):
        report(name, error)
    with compiling_for(75):
        for name, error in attention_errors({name: CASES[name] for name in WITHOUT_MATRIX_UNITS}, prefix="sm_75, "):
            report(name, error)
        experts("experts", "float16", prefix="sm_75, ")
    for name, error in errors_with_images():
        report(name, error)
    with compiling_for(90):
        by_instructions = {name: IN_BYTES[name] for name in BY_INSTRUCTIONS}
        for name, error in attention_errors(by_instructions, "uint8", prefix="fp8 of sm_90, "):
            report(name, error)
    for held_in, dtype in (("int8", "int8"), ("fp8", "uint8")):
        for name, error in attention_errors(IN_BYTES, dtype, prefix=f"{held_in}, "):
            report(name, error)
        writes(f"write {held_in} heads of 128", 128, 8, 16, dtype=dtype)
        writes(f"write {held_in} heads of 48", 48, 3, 40, dtype=dtype)
        writes(f"write {held_in} heads of 256", 256, 5, 8, dtype=dtype)
    report("read float8", wrong_values())
    report("round to float8", wrong_codes())
    report("block ids out of range", id_out_of_range_error())
    writes("write heads of 128", 128, 8, 16, dtype="bfloat16")
    writes("write heads of 48", 48, 3, 8, dtype="float32")
    writes("write heads of 256", 256, 5, 24, dtype="bfloat16")
    writes("write heads of 128, float16", 128, 8, 16, dtype="float16")
    report("copy a chain and a swap", copies_differ("bfloat16", (9, 2, 3, 200), [0, 1, 4, 5, 7], [1, 2, 5, 4, 8]))
    report("copy nowhere and from nowhere", copies_differ("float32", (6, 64), [0, -1, 6, 2], [-1, 3, 4, 5]))
    report("copy one block", copies_differ("int8", (3, 1000), [2], [0]))


if __name__ == "__main__":
    main()

"""Checks a GPU's kernels, each against float64 NumPy, or bit for bit, on fresh random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_copy import block_copy
from pallas_kernels.kv_codes import decode as decode_rows
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layout import unpack_kv, view_shape
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.platform import Impl, resolve_impl
from pallas_kernels.rotated_heads import HeadNorms, rotated_heads, takes

TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 5e-5}
ROTATED = (56, 8, 6, 128)
"""Shape of the queries, keys and values that are rotated: whole registers of a TPU, and no power of two."""
INT8_STEP = 0.05
"""The error that is allowed with int8: more than a step of the largest number drawn here, 6 / 127."""


@dataclass(frozen=True)
class Heads:
    """Describes a batch's attention: its heads, their width and their dtypes.

    Attributes:
        dtype: dtype of queries, K and V.
        kv_dtype: the dtype that K and V are held in, see `pallas_kernels.kv_codes`; None = dtype.
    """

    kv_heads: int = 4
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    soft_cap: float | None = None
    sliding_window: int | None = None
    chunk_size: int | None = None
    sinks: bool = False
    kv_dtype: str | None = None

    def shape(self, blocks: int, layers: int) -> tuple[int, ...]:
        """Return the shape of a view."""
        held = self.kv_dtype or self.dtype
        return view_shape(blocks, layers, self.kv_heads, self.head_dim, self.block_size, held)


CASES = (
    Heads(),
    Heads(dtype="float32"),
    Heads(dtype="float16"),
    Heads(head_dim=64, kv_heads=6, group=1, block_size=32),
    Heads(head_dim=48, group=7, dtype="float32"),
    Heads(head_dim=256, kv_heads=2, group=2, soft_cap=50.0, sliding_window=300),
    Heads(kv_heads=1, group=8, block_size=128, chunk_size=500),
    Heads(kv_heads=1, group=5, block_size=24),
    Heads(head_dim=64, group=8, sliding_window=128, sinks=True),
    Heads(kv_dtype="int8"),
    Heads(kv_dtype="uint8"),
    Heads(head_dim=64, group=8, sliding_window=128, sinks=True, kv_dtype="int8"),
    Heads(head_dim=64, dtype="float32", kv_dtype="uint8"),
    Heads(head_dim=256, kv_heads=2, group=2, soft_cap=50.0, block_size=40, kv_dtype="int8"),
)


def checks(
    seed: int, *, impl: Impl | None = None, context: int = 3000, cases: tuple[Heads, ...] = CASES
) -> Iterator[dict[str, Any]]:
    """Yield one line for each check: name, largest error, and the error that is allowed.

    Args:
        impl: which kernels; None = what this platform runs.
        context: longest sequence in tokens.
    """
    random = np.random.default_rng(seed)
    for heads in cases:
        yield from checks_of_heads(random, heads, impl=impl, context=context)
    yield from checks_of_rotation(random, impl=impl)
    yield from check_of_copies(random, impl=impl)


def checks_of_heads(
    random: np.random.Generator, heads: Heads, *, impl: Impl | None = None, context: int = 3000
) -> Iterator[dict[str, Any]]:
    """Yield the lines of attention and KV write for one description of heads."""
    for decode in (True, False):
        error = _attention_error(random, heads, context, decode, impl)
        name = f"paged_attention, {'decode' if decode else 'mixed'}, {heads}"
        yield {"check": name, "error": error, "limit": TOLERANCE[heads.dtype]}
    # A code that rounds another way is a step off: GPUs divide by the scale in more ways than one.
    limit = INT8_STEP if heads.kv_dtype == "int8" else 0.0
    yield {"check": f"kv_write, {heads}", "error": _write_error(random, heads, impl), "limit": limit}


def checks_of_rotation(random: np.random.Generator, *, impl: Impl | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of the rotation of queries and keys, in the dtypes that have a kernel."""
    own = resolve_impl(impl)
    for dtype, tolerance in TOLERANCE.items():
        if not takes(dtype, own, shape=ROTATED, half=ROTATED[-1] // 2):
            continue
        for kind in ("plain", "normed"):
            error = _rotation_error(random, dtype, own, normed=kind == "normed")
            yield {"check": f"rotated_heads, {kind}, {dtype}", "error": error, "limit": tolerance}


def check_of_copies(random: np.random.Generator, *, impl: Impl | None = None) -> Iterator[dict[str, Any]]:
    """Yield the line of block copies."""
    yield {"check": "block_copy, chains and swaps", "error": _copy_error(random, impl), "limit": 0.0}


def _attention_error(random: np.random.Generator, heads: Heads, context: int, decode: bool, impl: Impl | None) -> float:
    seqs, size = 6, heads.block_size
    lengths = [1] * seqs if decode else [1, context // 4, 1, 17, 0, 64]
    kv_lens = [int(random.integers(n, context + 1)) if n else 0 for n in lengths]
    kv_lens[0] = context
    pages = -(-context // size)
    blocks = seqs * pages + 1
    tables = random.permutation(blocks)[: seqs * pages].reshape(seqs, pages).astype(np.int32)
    view = _random_view(random, heads, blocks)
    q_shape = (sum(lengths) + 3, heads.kv_heads, heads.group, heads.head_dim)
    q = jnp.asarray(random.standard_normal(q_shape, np.float32), heads.dtype)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    options: dict[str, Any] = {
        "scale": heads.head_dim**-0.5,
        "soft_cap": heads.soft_cap,
        "sliding_window": heads.sliding_window,
        "chunk_size": heads.chunk_size,
        "max_query_len": 1 if decode else None,
        "sinks": sink_logits(heads) if heads.sinks else None,
    }
    attend = jax.jit(partial(paged_attention, impl=impl, **options))
    got = np.asarray(attend(q, view, 1, tables, starts, np.asarray(kv_lens, np.int32)), np.float64)
    error = float(np.abs(got[starts[-1] :]).max())  # rows of no sequence
    for s, kv_len in enumerate(kv_lens):
        if not lengths[s]:
            continue
        mine = slice(starts[s], starts[s + 1])
        rows = np.asarray(decode_rows(view[tables[s], 1]))  # pages, heads, tiles, block, 128
        rows = np.moveaxis(rows, 3, 1).reshape(pages * size, *rows.shape[1:3], rows.shape[4])[:kv_len]
        k, v = (np.asarray(x, np.float64) for x in unpack_kv(jnp.asarray(rows), heads.head_dim))
        want = dense_attention(np.asarray(q[mine], np.float64), k, v, heads)
        error = float(np.fmax(error, np.abs(got[mine] - want).max())) if np.isfinite(got[mine]).all() else np.inf
    return error


def _random_view(random: np.random.Generator, heads: Heads, blocks: int) -> jax.Array:
    """Return a view of two layers; what is held in bytes is written to the second."""
    if heads.kv_dtype is None:
        return jnp.asarray(random.standard_normal(heads.shape(blocks, 2), np.float32), heads.dtype)
    tokens = blocks * heads.block_size
    k, v = random.standard_normal((2, tokens, heads.kv_heads, heads.head_dim), np.float32)
    view = jnp.zeros(heads.shape(blocks, 2), heads.kv_dtype)
    return jax.jit(partial(kv_write, impl="reference"))(view, 1, k, v, np.arange(tokens))


def dense_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: Heads) -> np.ndarray:
    """Return the attention of the last ``len(q)`` tokens of one sequence, [queries, kv_heads, group, head_dim]
    float64."""
    query = np.arange(len(k) - len(q), len(k))[:, None]
    key = np.arange(len(k))
    seen = key <= query
    if heads.sliding_window is not None:
        seen &= key > query - heads.sliding_window
    if heads.chunk_size is not None:
        seen &= key // heads.chunk_size == query // heads.chunk_size
    scores = np.einsum("qhgd,khd->hgqk", q, k) * heads.head_dim**-0.5
    if heads.soft_cap is not None:
        scores = heads.soft_cap * np.tanh(scores / heads.soft_cap)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.where(seen, np.exp(scores - top), 0)
    sink = np.exp(sink_logits(heads)[:, :, None, None] - top) if heads.sinks else 0
    return np.einsum("hgqk,khd->qhgd", weights / (weights.sum(-1, keepdims=True) + sink), v)


def sink_logits(heads: Heads) -> np.ndarray:
    """Return sink logits, [kv_heads, group] float32, from hardly any share of the softmax to nearly all of it."""
    return np.linspace(-3, 6, heads.kv_heads * heads.group, dtype=np.float32).reshape(heads.kv_heads, -1)


def _write_error(random: np.random.Generator, heads: Heads, impl: Impl | None) -> float:
    blocks, tokens = 40, 100
    shape = heads.shape(blocks, 3)
    view = jnp.zeros(shape, heads.kv_dtype or heads.dtype)
    if heads.kv_dtype is None:
        view += random.standard_normal(shape, np.float32).astype(view.dtype)
    kv = random.standard_normal((2, tokens, heads.kv_heads, heads.head_dim)).astype(np.float32)
    k, v = jnp.asarray(kv, heads.dtype)
    slots = random.permutation(blocks * heads.block_size)[:tokens].astype(np.int32)
    slots[:3] = [-1, blocks * heads.block_size, 2**30]
    want, got = (jax.jit(partial(kv_write, impl=i))(view, 2, k, v, slots) for i in ("reference", impl))
    if heads.kv_dtype == "int8":
        return float(jnp.abs(decode_rows(want) - decode_rows(got)).max())
    return float(jnp.sum(want != got))


def _rotation_error(random: np.random.Generator, dtype: str, impl: Impl, *, normed: bool) -> float:
    """Return the largest difference of queries and keys, infinity where values are not the same to the bit."""
    joined = jnp.asarray(random.standard_normal(ROTATED, np.float32), dtype)
    angles = random.uniform(0, 100, (ROTATED[0], ROTATED[-1] // 2)).astype(np.float32)
    q, k = jnp.asarray(random.uniform(0.5, 1.5, (2, 128)), dtype)
    norms = HeadNorms(q, k, eps=1e-6) if normed else None
    got, want = (
        jax.jit(partial(rotated_heads, norms=norms, impl=i))(joined, np.cos(angles), np.sin(angles))
        for i in (impl, "reference")
    )
    errors = [
        np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max() for a, b in zip(got, want, strict=True)
    ]
    return float(max(errors)) if errors[2] == 0 else np.inf


def _copy_error(random: np.random.Generator, impl: Impl | None) -> float:
    blocks = jnp.asarray(random.standard_normal((50, 4, 1000), np.float32), jnp.bfloat16)
    src = np.asarray([0, 1, 2, 5, 6, -1, 9, 50, *random.integers(10, 50, 20)], np.int32)
    dst = np.asarray([1, 2, 3, 6, 5, 7, -1, 8, *random.permutation(np.arange(10, 50))[:20]], np.int32)
    want, got = (jax.jit(partial(block_copy, impl=i))(blocks, src, dst) for i in ("reference", impl))
    return float(jnp.sum(want != got))

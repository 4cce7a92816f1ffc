"""Measures a GPU's kernels against the memory bandwidth and matrix products of the same machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.planning.machine import median_seconds
from pallas_kernels.block_copy import block_copy
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layout import view_shape
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.platform import Impl


@dataclass(frozen=True)
class Sizes:
    """Says how large what is measured is, in a dtype of two bytes. The defaults are an 8B Llama's attention."""

    batch: int = 64
    context: int = 4096
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    layers: int = 2
    prompts: int = 4
    writes: int = 8192
    copies: int = 64
    repeats: int = 20
    yardstick_bytes: int = 1 << 30
    gemm: int = 8192
    dtype: str = "bfloat16"

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of KV that one decode of the whole batch reads."""
        return self.batch * self.context * self.kv_heads * self.head_dim * 2 * 2

    @property
    def prefill_flop(self) -> int:
        """Return the FLOP of causal attention over `prompts` prompts of `context` tokens."""
        return self.prompts * 4 * self.kv_heads * self.group * self.head_dim * self.context * (self.context + 1) // 2


def seconds_a_call(function: Callable[[Any], Any], carry: Any, repeats: int) -> float:
    """Measure the device time of ``carry = function(carry)``, `repeats` of them in one program: no launch from Python
    between."""
    many = jax.jit(lambda x: lax.fori_loop(0, repeats, lambda _, y: function(y), x), donate_argnums=0)
    state = [carry]

    def run() -> Any:
        state[0] = many(state[0])
        return state[0]

    return median_seconds(run, repeats=5) / repeats


def copy_bandwidth(sizes: Sizes) -> float:
    """Measure the bytes/s read and written by ``x + 1`` on an array much larger than the caches."""
    x = jnp.zeros(sizes.yardstick_bytes // 4, jnp.int32)
    return 2 * sizes.yardstick_bytes / seconds_a_call(lambda x: x + 1, x, sizes.repeats)


def gemm_flops(sizes: Sizes) -> float:
    """Measure the FLOP/s of a square product."""
    n = sizes.gemm
    a = jax.random.normal(jax.random.key(0), (n, n), sizes.dtype)
    return 2 * n**3 / seconds_a_call(lambda x: jnp.dot(x, x) * jnp.asarray(n**-0.5, x.dtype), a, sizes.repeats)


def decode_seconds(sizes: Sizes, impl: Impl | None) -> float:
    """Measure the attention of one decode of the whole batch, in seconds."""
    every = jnp.arange(sizes.batch + 1, dtype=jnp.int32)
    full = jnp.full(sizes.batch, sizes.context, jnp.int32)
    view, tables = _view(sizes), _tables(sizes)
    attend = partial(paged_attention, scale=sizes.head_dim**-0.5, impl=impl, max_query_len=1)
    return seconds_a_call(
        lambda q: attend(q, view, 1, tables, every, full), _queries(sizes, sizes.batch), sizes.repeats
    )


def prefill_seconds(sizes: Sizes, impl: Impl | None) -> float:
    """Measure the attention of `prompts` whole prompts, in seconds."""
    starts = jnp.arange(sizes.prompts + 1, dtype=jnp.int32) * sizes.context
    where = _tables(sizes)[: sizes.prompts], starts, jnp.full(sizes.prompts, sizes.context, jnp.int32)
    view, attend = _view(sizes), partial(paged_attention, scale=sizes.head_dim**-0.5, impl=impl)
    queries = _queries(sizes, sizes.prompts * sizes.context)
    return seconds_a_call(lambda q: attend(q, view, 1, *where), queries, max(1, sizes.repeats // 4))


def _tables(sizes: Sizes) -> jax.Array:
    """Return the sequences' block tables, in any order."""
    pages = sizes.context // sizes.block_size
    return jnp.asarray(np.random.default_rng(0).permutation(sizes.batch * pages).reshape(sizes.batch, pages), jnp.int32)


def _view(sizes: Sizes) -> jax.Array:
    blocks = sizes.batch * (sizes.context // sizes.block_size)
    shape = view_shape(blocks, sizes.layers, sizes.kv_heads, sizes.head_dim, sizes.block_size)
    return jax.random.normal(jax.random.key(1), shape, sizes.dtype)


def _queries(sizes: Sizes, tokens: int) -> jax.Array:
    shape = (tokens, sizes.kv_heads, sizes.group, sizes.head_dim)
    return jax.random.normal(jax.random.key(2), shape, sizes.dtype)


def measure(sizes: Sizes, impl: Impl | None) -> dict[str, float]:
    """Measure decode attention, KV write and block copy in bytes/s, prefill attention in FLOP/s."""
    decode, prefill = decode_seconds(sizes, impl), prefill_seconds(sizes, impl)
    random = np.random.default_rng(0)
    view = _view(sizes)
    blocks = len(view)
    kv = jax.random.normal(jax.random.key(3), (2, sizes.writes, sizes.kv_heads, sizes.head_dim), sizes.dtype)
    slots = jnp.asarray(random.permutation(blocks * sizes.block_size)[: sizes.writes], jnp.int32)
    write = seconds_a_call(lambda v: kv_write(v, 1, kv[0], kv[1], slots, impl=impl), view, sizes.repeats)
    view = _view(sizes)  # the one before was donated
    pairs = jnp.asarray(random.permutation(blocks)[: 2 * sizes.copies].reshape(2, -1), jnp.int32)
    block_bytes = view.nbytes // blocks
    copy = seconds_a_call(lambda v: block_copy(v, pairs[0], pairs[1], impl=impl), view, sizes.repeats)
    return {
        "decode_bytes_per_second": sizes.kv_bytes / decode,
        "prefill_flops": sizes.prefill_flop / prefill,
        "kv_write_bytes_per_second": 2 * kv.nbytes / write,
        "block_copy_bytes_per_second": 2 * sizes.copies * block_bytes / copy,
    }

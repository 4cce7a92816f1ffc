"""Measures others' attention on the same GPU: JAX's own paged attention, and torch's on contiguous keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from scripts.benchmarks.gpu_check.kernels import Sizes, seconds_a_call


def measure(sizes: Sizes) -> dict[str, dict[str, float | str]]:
    """Measure each peer's decode (bytes/s) and, where it has one, prefill (FLOP/s), or tell why it could not run."""
    found: dict[str, dict[str, float | str]] = {}
    for name, run in (("jax pallas gpu paged_attention", _jax), ("torch SDPA, contiguous", _torch)):
        try:
            found[name] = dict(run(sizes))
        except Exception as error:  # not installed, gone from JAX, or refused by the GPU: all are findings
            found[name] = {"missing": f"{type(error).__name__}: {error}".splitlines()[0]}
    return found


def _jax(sizes: Sizes) -> dict[str, float]:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    pages = sizes.context // sizes.block_size
    blocks = sizes.batch * pages
    tables = np.random.default_rng(0).permutation(blocks).reshape(sizes.batch, pages)
    shape = (sizes.kv_heads, blocks, sizes.block_size, sizes.head_dim)
    k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))
    q = jax.random.normal(jax.random.key(2), (sizes.batch, sizes.kv_heads * sizes.group, sizes.head_dim), jnp.bfloat16)
    lengths = jnp.full(sizes.batch, sizes.context, jnp.int32)
    ids = jnp.asarray(tables, jnp.int32)
    seconds = seconds_a_call(lambda q: paged_attention(q, k, v, ids, lengths), q, sizes.repeats)
    return {"decode_bytes_per_second": sizes.kv_bytes / seconds}


def _torch(sizes: Sizes) -> dict[str, float]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")

    def seconds(batch: int, queries: int, causal: bool) -> float:
        def draw(heads: int, tokens: int) -> torch.Tensor:
            return torch.randn(batch, heads, tokens, sizes.head_dim, device="cuda", dtype=torch.bfloat16)

        q, k = draw(sizes.kv_heads * sizes.group, queries), draw(sizes.kv_heads, sizes.context)
        v = torch.randn_like(k)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for turn in range(3 + sizes.repeats):
            if turn == 3:
                start.record()
            scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / sizes.repeats

    return {
        "decode_bytes_per_second": sizes.kv_bytes / seconds(sizes.batch, 1, causal=False),
        "prefill_flops": sizes.prefill_flop / seconds(sizes.prompts, sizes.context, causal=True),
    }

"""Compile the kernels for TPU v5e x8 at Llama-3-8B shapes and print what the compiled program needs, as JSON.

Run by `test_aot_kernels.py` inside the environment with libtpu, with names of programs; one a line.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from math import prod

from targets import AXIS, tpu_mesh

LAYERS, KV_HEADS, GROUP, HEAD_DIM, BLOCK = 32, 8, 4, 128, 16
BLOCKS, SEQS, PAGES, LONG_PAGES = 4096, 64, 512, 8192


def main(names: list[str]) -> None:
    mesh = tpu_mesh("v5e:2x4")  # before jax is imported

    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels.block_copy import block_copy
    from pallas_kernels.kv_codes import TPU_TILE
    from pallas_kernels.kv_write import kv_write
    from pallas_kernels.layout import view_shape
    from pallas_kernels.paged_attention import paged_attention

    shards = mesh.size
    local_view = view_shape(BLOCKS, LAYERS, KV_HEADS // shards, HEAD_DIM, BLOCK)
    view_of_codes = view_shape(BLOCKS, LAYERS, KV_HEADS // shards, HEAD_DIM, 2 * BLOCK, jnp.int8, TPU_TILE)
    heads = P(None, AXIS)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    ints = partial(array, dtype=jnp.int32, spec=P())
    pool = array((shards, BLOCKS, prod(local_view[1:5]), 128), jnp.bfloat16, P(AXIS))
    pool_of_codes = array((shards, BLOCKS, prod(view_of_codes[1:5]), 128), jnp.int8, P(AXIS))

    def writes_and_attention(shape, pool, q, k, v, slots, tables, starts, kv_lens, **limits):
        def layer_step(carry, layer):
            view, q = carry
            view = kv_write(view, layer, k, v, slots, impl="tpu")
            q = paged_attention(q, view, layer, tables, starts, kv_lens, scale=1.0, impl="tpu", **limits)
            return (view, q), None

        carry = (pool[0].reshape(shape), q)
        (view, q), _ = lax.scan(layer_step, carry, jnp.arange(LAYERS))
        return view.reshape(pool.shape), q

    def copies(pool, src, dst):
        return block_copy(pool[0].reshape(local_view), src, dst, impl="tpu").reshape(pool.shape)

    def report(name, function, in_specs, out_specs, arguments):
        sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        memory = jax.jit(sharded, donate_argnums=0).lower(*arguments).compile().memory_analysis()
        pool = arguments[0]
        pool_bytes = pool.size * pool.dtype.itemsize // shards
        sizes = {"pool": pool_bytes, "alias": memory.alias_size_in_bytes, "temp": memory.temp_size_in_bytes}
        print(json.dumps({"name": name} | sizes), flush=True)

    step_specs = (P(AXIS), heads, heads, heads, P(), P(), P(), P())
    programs = (
        ("decode", SEQS, {"max_query_len": 1}, local_view, pool, PAGES),
        ("decode, tables in HBM", SEQS, {"max_query_len": 1}, local_view, pool, LONG_PAGES),
        ("mixed", 1024, {}, local_view, pool, PAGES),
        ("mixed, window", 1024, {"sliding_window": 1000}, local_view, pool, PAGES),
        ("mixed, chunks", 1024, {"chunk_size": 1000}, local_view, pool, PAGES),
        ("mixed, int8", 1024, {}, view_of_codes, pool_of_codes, PAGES),
        ("mixed, tables in HBM", 1024, {}, local_view, pool, LONG_PAGES),
    )
    for name, tokens, limits, shape, blocks, pages in programs:
        if name not in names:
            continue
        q = array((tokens, KV_HEADS, GROUP, HEAD_DIM), jnp.bfloat16, heads)
        kv = array((tokens, KV_HEADS, HEAD_DIM), jnp.bfloat16, heads)
        batch = (ints((tokens,)), ints((SEQS, pages)), ints((SEQS + 1,)), ints((SEQS,)))
        step = partial(writes_and_attention, shape, **limits)
        report(name, step, step_specs, (P(AXIS), heads), (blocks, q, kv, kv, *batch))
    pairs = ints((SEQS,))
    if "block_copy" in names:
        report("block_copy", copies, (P(AXIS), P(), P()), P(AXIS), (pool, pairs, pairs))


if __name__ == "__main__":
    main(sys.argv[1:])

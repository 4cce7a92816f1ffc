"""Makes the launches that `tpu_attention` compiles: kernels at the shapes of published models, for absent chips."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple


class Chip(NamedTuple):
    """Describes one TensorCore and the HBM it reads.

    Attributes:
        topology: smallest slice of it that can be compiled for.
        hbm: bytes a second, of the chip for one core.
        clock: Hz that the peak of its matrix units implies.
        flops: bfloat16 operations a second, of one core.
    """

    topology: str
    hbm: float
    clock: float
    flops: float


CHIPS = {
    "v5e": Chip("v5e:2x4", 819e9, 1.50e9, 197e12),
    "v5p": Chip("v5p:2x2x1", 2765e9 / 2, 1.75e9, 459e12 / 2),
    "v6e": Chip("v6e:2x2", 1640e9, 1.75e9, 918e12),
    "tpu7x": Chip("tpu7x:2x2x1", 7380e9 / 2, 2.20e9, 2307e12 / 2),
}


class Launch(NamedTuple):
    """Describes a kernel to compile.

    Attributes:
        rows: query rows of a KV head that one turn multiplies; 0 = the kernel multiplies nothing.
        key_bytes: bytes of the keys and values of one token in the pool.
        name: what the kernel's name contains.
        shared_keys: keys of a turn whose copies start outside of it, for several turns; 0 = a turn starts its own.
        sharing: turns that share these copies where a tile is full.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rows: int
    key_bytes: float
    name: str
    shared_keys: int = 0
    sharing: int = 1


class Heads(NamedTuple):
    """Describes the attention heads of one device; `sinks`: each query head has one."""

    kv: int
    q_per_kv: int
    dim: int
    sinks: bool = False


SHAPES = {
    "llama-3.1-8b": Heads(8, 4, 128),
    "llama-3.1-8b x8": Heads(1, 4, 128),
    "llama-3.3-70b x8": Heads(1, 8, 128),
    "gemma-3-27b": Heads(16, 2, 128),
    "qwen3-0.6b": Heads(8, 2, 128),
    "gpt-oss-20b": Heads(8, 8, 64, sinks=True),
}
KV_DTYPES = {"bfloat16": "bfloat16", "int8": "int8", "fp8": "uint8"}
SEQS, CONTEXT, MIXED_TOKENS, LAYERS, BLOCKS = 64, 4096, 1024, 2, 8192


def shapes_of(chip: Chip, batch: str):
    """Return (function from shape and dtype to an argument on the chip, tokens of the batch, arguments all kernels
    take)."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
    here = NamedSharding(Mesh([device], "x"), P())

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    return array, SEQS if batch == "decode" else MIXED_TOKENS, device


def jpaged_kernel(chip: Chip, heads: Heads, batch: str, block_size: int, kv: str) -> Launch:
    import jax.numpy as jnp

    from pallas_kernels.kv_codes import TPU_TILE
    from pallas_kernels.layout import view_shape
    from pallas_kernels.paged_attention import paged_attention, plan_attention
    from pallas_kernels.paged_attention.tpu import MAX_HEADS, pages_of_step
    from pallas_kernels.paged_attention.tpu_plan import tile_of_batch, tuning_of

    array, tokens, device = shapes_of(chip, batch)
    dtype = jnp.dtype(KV_DTYPES[kv])

    longest = 1 if batch == "decode" else tokens

    def run(q, view, layer, *where, sinks=None):
        limits: dict[str, Any] = {"max_query_len": longest, "impl": "tpu"}
        shapes = {"tokens": tokens, "q_per_kv": heads.q_per_kv, "device_kind": device.device_kind}
        plan = plan_attention(view, *where, **shapes, **limits)
        return paged_attention(q, view, layer, *where, scale=1.0, sinks=sinks, plan=plan, **limits)

    def run_with_sinks(sinks, *arguments):
        return run(*arguments, sinks=sinks)

    shape = view_shape(BLOCKS * 16 // block_size, LAYERS, heads.kv, heads.dim, block_size, dtype, TPU_TILE)
    tuning = tuning_of(device.device_kind, heads.kv, heads.dim)
    tile = tile_of_batch(tokens, longest, heads.q_per_kv, dtype, tuning)
    key_bytes = prod(shape[2:]) * dtype.itemsize / block_size
    arguments = (
        array((tokens, heads.kv, heads.q_per_kv, heads.dim), jnp.bfloat16),
        array(shape, dtype),
        array(()),
        array((SEQS, CONTEXT // block_size)),
        array((SEQS + 1,)),
        array((SEQS,)),
    )
    function: Callable[..., Any] = run
    if heads.sinks:
        sinks = array((heads.kv, heads.q_per_kv), jnp.bfloat16)
        function, arguments = run_with_sinks, (sinks, *arguments)
    if batch == "decode":
        return Launch(function, arguments, heads.q_per_kv, key_bytes, "paged_attention_decode")
    taken = max(n for n in range(1, min(heads.kv, MAX_HEADS) + 1) if heads.kv % n == 0)
    row_bytes = taken * shape[3] * shape[5] * dtype.itemsize
    _, step_pages = pages_of_step(row_bytes, block_size, CONTEXT // block_size, tuning)
    keys = step_pages * block_size * taken // heads.kv
    rows = heads.q_per_kv * tile.chunk
    return Launch(function, arguments, rows, key_bytes, "paged_attention_prompts", keys, tile.chunks)


def jax_kernel(chip: Chip, heads: Heads, batch: str, block_size: int, kv: str) -> Launch:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_rpa
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as jax_tiles
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes as tuned

    array, tokens, device = shapes_of(chip, batch)
    if kv != "bfloat16":
        raise ValueError(f"kv={kv!r}: compared with jax's kernel in bfloat16 only")
    tuned.get_tpu_version = lambda: 7 if "7" in device.device_kind else int(device.device_kind.split()[1][1])
    tuned.get_device_name = lambda: " ".join(device.device_kind.split()[:2])

    q_heads, kv_heads = jax_tiles.get_min_heads_per_blk(
        heads.kv * heads.q_per_kv, 2 * heads.kv, jnp.bfloat16, jnp.bfloat16
    )
    key = jnp.bfloat16, jnp.bfloat16, q_heads, kv_heads // 2, heads.dim, block_size, tokens, CONTEXT // block_size
    _, queries = tuned.get_tuned_block_sizes(*key)

    def run(*arguments):
        return jax_rpa.ragged_paged_attention(*arguments, vmem_limit_bytes=100 * 2**20)

    arguments = (
        array((tokens, heads.kv * heads.q_per_kv, heads.dim), jnp.bfloat16),
        array((BLOCKS * 16 // block_size, block_size, 2 * heads.kv, heads.dim), jnp.bfloat16),
        array((SEQS,)),
        array((SEQS, CONTEXT // block_size)),
        array((SEQS + 1,)),
        array((1,)),
    )
    key_bytes = 2 * heads.kv * heads.dim * jnp.dtype(jnp.bfloat16).itemsize
    return Launch(run, arguments, heads.q_per_kv * queries, key_bytes, "paged_attention")


def kv_write_kernel(chip: Chip, heads: Heads, batch: str, block_size: int, kv: str) -> Launch:
    """Return the launch of `kv_write`, a turn of which is one run of tokens of one block: in a decode step each
    sequence's token."""
    import jax.numpy as jnp

    from pallas_kernels.kv_codes import TPU_TILE
    from pallas_kernels.kv_write import kv_write
    from pallas_kernels.layout import view_shape

    array, tokens, _ = shapes_of(chip, batch)
    dtype = jnp.dtype(KV_DTYPES[kv])
    shape = view_shape(BLOCKS * 16 // block_size, LAYERS, heads.kv, heads.dim, block_size, dtype, TPU_TILE)
    new = array((tokens, heads.kv, heads.dim), jnp.bfloat16)

    def run(*arguments):
        return kv_write(*arguments, impl="tpu")

    key_bytes = prod(shape[2:]) * dtype.itemsize / block_size
    return Launch(run, (array(shape, dtype), array(()), new, new, array((tokens,))), 0, key_bytes, "kv_write")


KERNELS = {"jpaged": jpaged_kernel, "jax": jax_kernel, "kv_write": kv_write_kernel}

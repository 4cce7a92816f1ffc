"""Makes the launches of attention that `tpu_attention` simulates: kernels at the shapes of published models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from scripts.compiled_code.simulated import Launch
from scripts.compiled_code.tpu_chips import CHIPS, Chip


class Heads(NamedTuple):
    """Describes the attention heads of one device.

    Attributes:
        sinks: each query head has one.
        window: tokens that a query sees; None = all.
        rank: width of latents, of which a row has `dim` lanes (DeepSeek); None = K and V.
    """

    kv: int
    q_per_kv: int
    dim: int
    sinks: bool = False
    window: int | None = None
    rank: int | None = None

    @property
    def lanes(self) -> int:
        """Return the lanes of a head as the kernel counts them: half of those that a token's K and V take."""
        return self.view_shape(128, "bfloat16")[3] * 128 // 2

    def view_shape(self, block_size: int, dtype: Any) -> tuple[int, ...]:
        """Return the shape of the pool's view."""
        from pallas_kernels.kv_codes import TPU_TILE
        from pallas_kernels.layout import latent_view_shape, view_shape

        blocks = BLOCKS * 16 // block_size
        if self.rank is not None:
            return latent_view_shape(blocks, LAYERS, self.dim, block_size, dtype, TPU_TILE)
        return view_shape(blocks, LAYERS, self.kv, self.dim, block_size, dtype, TPU_TILE)


SHAPES = {
    "llama-3.1-8b": Heads(8, 4, 128),
    "llama-3.1-8b x8": Heads(1, 4, 128),
    "llama-3.3-70b x8": Heads(1, 8, 128),
    "gemma-3-27b": Heads(16, 2, 128),
    "qwen3-0.6b": Heads(8, 2, 128),
    "gpt-oss-20b": Heads(8, 8, 64, sinks=True),
    "gpt-oss-20b window": Heads(8, 8, 64, sinks=True, window=128),
    "gemma-3-27b window": Heads(16, 2, 128, window=1024),
    "gemma-2-9b": Heads(8, 2, 256),
    "deepseek-v3 x8": Heads(1, 16, 576, rank=512),
}
KV_DTYPES = {"bfloat16": "bfloat16", "int8": "int8", "fp8": "uint8"}
SEQS, CONTEXT, MIXED_TOKENS, PROMPTS, LAYERS, BLOCKS, COPIES = 64, 4096, 1024, 4, 2, 16384, 16


def arrays_of(chip: Chip) -> tuple[Callable[..., Any], Any]:
    """Return a function from shape and dtype to an argument on a chip, and the chip's device."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    if jax.default_backend() == "tpu":  # a real one, on which `chip_times` runs the launches
        device = jax.devices()[0]
    else:
        device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
    here = NamedSharding(Mesh([device], "x"), P())

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    return array, device


class Batch(NamedTuple):
    """Holds a step's sequences: the tokens of each, and the keys that each sees with its last token."""

    queries: np.ndarray
    keys: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.queries.sum())

    def known(self, first: int, block_size: int) -> dict[int, np.ndarray]:
        """Return layer, block tables, starts and lengths, as arguments from place `first` on.

        Blocks of a sequence lie apart from each other, as after some hours of serving.
        """
        pages = CONTEXT // block_size
        tables = np.random.default_rng(0).permutation(SEQS * pages).astype(np.int32).reshape(SEQS, pages)
        starts = np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)
        known = np.zeros((), np.int32), tables, starts, self.keys.astype(np.int32)
        return {first + place: value for place, value in enumerate(known)}


def batch_of(kind: str, lengths: str | int) -> Batch:
    """Return a step of 64 sequences.

    Args:
        kind: "decode", a token each; "mixed", 60 such and four prompts of 241 tokens, which end at their context.
        lengths: "equal", all of 4,096 keys; "drawn", from 1 to 4,096, of prompts from 241; or how many keys all have.
    """
    queries = np.ones(SEQS, np.int64)
    if kind == "mixed":
        queries[-PROMPTS:] = (MIXED_TOKENS - SEQS + PROMPTS) // PROMPTS
    keys = np.full(SEQS, lengths if isinstance(lengths, int) else CONTEXT)
    if lengths == "drawn":
        keys = np.maximum(np.random.default_rng(1).integers(1, CONTEXT + 1, SEQS), queries)
    return Batch(queries, keys)


def attention_kernel(
    target: str, heads: Heads, batch: str, block_size: int, kv: str, lengths: str | int, tuning: Any = None
) -> Launch:
    """Return the launch of attention for the sequences of a batch that decode, or for its prompts.

    Args:
        tuning: sizes of the launch, a `Tuning`; None = the kernel's own.
    """
    import jax.numpy as jnp

    from pallas_kernels.latent_attention import latent_attention
    from pallas_kernels.paged_attention import paged_attention, plan_attention

    array, device = arrays_of(CHIPS[target])
    dtype = jnp.dtype(KV_DTYPES[kv])
    step = batch_of(batch, lengths)
    longest = 1 if batch == "decode" else step.tokens

    def run(q, view, layer, *where, sinks=None):
        limits: dict[str, Any] = {"max_query_len": longest, "impl": "tpu"}
        shapes = {"tokens": step.tokens, "q_per_kv": heads.q_per_kv, "device_kind": device.device_kind}
        plan = plan_attention(view, *where, sliding_window=heads.window, tuning=tuning, **shapes, **limits)
        if heads.rank is not None:
            return latent_attention(q[:, 0], view, layer, *where, rank=heads.rank, scale=1.0, plan=plan, **limits)
        mask = {"sliding_window": heads.window, "sinks": sinks}
        return paged_attention(q, view, layer, *where, scale=1.0, plan=plan, **mask, **limits)

    def run_with_sinks(*arguments):
        *others, sinks = arguments
        return run(*others, sinks=sinks)

    shape = heads.view_shape(block_size, dtype)
    arguments = (
        array((step.tokens, heads.kv, heads.q_per_kv, heads.dim), jnp.bfloat16),
        array(shape, dtype),
        array(()),
        array((SEQS, CONTEXT // block_size)),
        array((SEQS + 1,)),
        array((SEQS,)),
    )
    function: Callable[..., Any] = run
    if heads.sinks:
        function, arguments = run_with_sinks, (*arguments, array((heads.kv, heads.q_per_kv), jnp.bfloat16))
    known = step.known(2, block_size)
    if batch == "mixed":  # how often a prompt's keys are read depends on its tiles
        return Launch(function, arguments, "paged_attention_prompts", "prompt attention", known, {})
    block_bytes = prod(shape[2:]) * dtype.itemsize
    first = np.zeros_like(step.keys) if heads.window is None else np.maximum(step.keys - heads.window, 0)
    moved = int((-(-step.keys // block_size) - first // block_size).sum()) * block_bytes
    return Launch(function, arguments, "paged_attention_decode", "decode attention", known, {1: moved})


def fused_kernel(target: str, heads: Heads, batch: str, block_size: int, kv: str, lengths: str | int) -> Launch:
    """Return the launch that writes a decode's K and V and attends.

    Raises:
        ValueError: the batch is no decode.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels.latent_attention import write_and_attend_to_latents
    from pallas_kernels.paged_attention import plan_attention, write_and_attend

    if batch != "decode":
        raise ValueError(f"batch={batch!r}: only decodes are written and attended to at once")
    alone = attention_kernel(target, heads, batch, block_size, kv, lengths)
    q, view, layer, *where = alone.arguments
    new = jax.ShapeDtypeStruct((q.shape[0], heads.kv, heads.dim), jnp.bfloat16, sharding=q.sharding)
    (device,) = q.sharding.mesh.devices.flat

    def run(view, layer, q, k, v, tables, starts, lens, *sinks):
        shapes = {"tokens": q.shape[0], "q_per_kv": heads.q_per_kv, "device_kind": device.device_kind}
        mask = {"sliding_window": heads.window, "sinks": sinks[0] if sinks else None}
        limits = {"max_query_len": 1, "impl": "tpu"}
        plan = plan_attention(view, tables, starts, lens, sliding_window=heads.window, **shapes, **limits)
        how: dict[str, Any] = {"scale": 1.0, "plan": plan, "impl": "tpu"}
        if heads.rank is not None:
            where = tables, starts, lens
            return write_and_attend_to_latents(q[:, 0], view, layer, k[:, 0], *where, rank=heads.rank, **how)
        return write_and_attend(q, view, layer, k, v, tables, starts, lens, **how, **mask)

    tile = 32 // view.dtype.itemsize + (view.shape[4] - block_size)  # rows that are written, those of scales among them
    written = SEQS * heads.kv * view.shape[3] * 128 * tile * view.dtype.itemsize
    known = {1: alone.known[2], **{place + 2: value for place, value in alone.known.items() if place > 2}}
    return alone._replace(
        function=run,
        arguments=(view, layer, q, new, new, *where),
        known=known,
        moved={0: alone.moved[1] + written},
        donated=(0,),
    )


def kv_write_kernel(target: str, heads: Heads, batch: str, block_size: int, kv: str, lengths: str | int) -> Launch:
    """Return the launch of `kv_write` for a step's tokens, which are the last of their sequences."""
    import jax.numpy as jnp

    from pallas_kernels.kv_write import kv_write
    from pallas_kernels.latent_attention import latent_write

    array, _ = arrays_of(CHIPS[target])
    dtype = jnp.dtype(KV_DTYPES[kv])
    step = batch_of(batch, lengths)
    shape = heads.view_shape(block_size, dtype)
    new = array((step.tokens, heads.kv, heads.dim), jnp.bfloat16)

    def run(view, layer, k, v, slots):
        if heads.rank is not None:
            return latent_write(view, layer, k[:, 0], slots, impl="tpu")
        return kv_write(view, layer, k, v, slots, impl="tpu")

    layer, tables, _, keys = step.known(0, block_size).values()
    places = [
        (sequence, key)
        for sequence, (end, queries) in enumerate(zip(keys, step.queries, strict=True))
        for key in range(end - queries, end)
    ]
    slots = [tables[sequence, key // block_size] * block_size + key % block_size for sequence, key in places]
    known = {1: layer, 4: np.array(slots, np.int32)}
    arguments = (array(shape, dtype), array(()), new, new, array((step.tokens,)))
    row_bytes = shape[2] * shape[3] * shape[5] * dtype.itemsize
    moved = {0: row_bytes * sum(_rows_of_runs(step, block_size, shape[4], 32 // dtype.itemsize))}
    return Launch(run, arguments, "kv_write", "other", known, moved, (0,))


def _rows_of_runs(step: Batch, block_size: int, block_rows: int, tile: int) -> Iterator[int]:
    """Yield the rows that `kv_write` moves for each run of tokens of a block: the tile that has all of them, and the
    rows of scales, or the whole block, of which only the scales are read if the run fills it."""
    for end, queries in zip(step.keys.tolist(), step.queries.tolist(), strict=True):
        for block in range((end - queries) // block_size, (end - 1) // block_size + 1):
            first, stop = (min(max(key - block * block_size, 0), block_size) for key in (end - queries, end))
            if tile < block_size and first // tile == (stop - 1) // tile:
                yield 2 * (tile + block_rows - block_size)
            else:
                yield block_rows + (block_rows - block_size if stop - first == block_size else block_rows)


def block_copy_kernel(target: str, heads: Heads, batch: str, block_size: int, kv: str, lengths: str | int) -> Launch:
    """Return the launch of `block_copy` that gives 16 sequences blocks of their own (copy-on-write), all layers."""
    import jax.numpy as jnp

    from pallas_kernels.block_copy import block_copy

    array, _ = arrays_of(CHIPS[target])
    dtype = jnp.dtype(KV_DTYPES[kv])
    shape = heads.view_shape(block_size, dtype)
    pairs = np.random.default_rng(0).permutation(shape[0])[: 2 * COPIES].astype(np.int32).reshape(2, COPIES)
    arguments = (array(shape, dtype), array((COPIES,)), array((COPIES,)))
    moved = 2 * COPIES * prod(shape[1:]) * dtype.itemsize

    def run(blocks, src, dst):
        return block_copy(blocks, src, dst, impl="tpu")

    return Launch(run, arguments, "block_copy", "other", {1: pairs[0], 2: pairs[1]}, {0: moved}, (0,))


KERNELS = {
    "attention": attention_kernel,
    "write and attend": fused_kernel,
    "kv_write": kv_write_kernel,
    "block_copy": block_copy_kernel,
}

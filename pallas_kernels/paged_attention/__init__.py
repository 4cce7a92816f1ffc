"""Attends from a ragged batch to KV memory scattered in blocks (PagedAttention, SOSP'23, 4.1 and 5.1).

`paged_attention` picks `reference` (plain jnp), `xla` (fast on any backend), `cpu` (Numba), `tpu` (Pallas Mosaic) or
`gpu` (Triton). Each module holds a function of that name, which takes an `AttentionCall`.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.gpu_launch import multiplies
from pallas_kernels.kv_codes import check_kernel
from pallas_kernels.layout import check_view, pack_kv, padded_head_dim
from pallas_kernels.paged_attention import cpu, gpu_shapes, reference, tpu, xla
from pallas_kernels.paged_attention.reference import AttentionCall, Reach
from pallas_kernels.paged_attention.tpu_plan import Plan, Tuning, make_plan
from pallas_kernels.platform import Impl, resolve_impl

__all__ = ["Plan", "Tuning", "fuses_writes", "paged_attention", "plan_attention", "write_and_attend"]


def paged_attention(
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
    last_keys: Int[Array, " tokens"] | None = None,
    max_query_len: int | None = None,
    plan: Plan | None = None,
    impl: Impl | None = None,
) -> Float[Array, "tokens kv_heads q_per_kv head_dim"]:
    """Attend causally from each token to its own sequence's cached tokens, itself included.

    Sequence s owns tokens ``query_starts[s]:query_starts[s+1]``, the last ones of its ``kv_lens[s]`` cached
    tokens: query i of it sits at position ``kv_lens[s] - query_len + i``. The softmax runs in float32.

    Args:
        q: queries, grouped by the KV head they share.
        view: a layer group's KV memory, laid out as `pallas_kernels.layout` says; only read.
        layer: the layer's index in the view; may be traced.
        block_tables: physical block of each logical page. Ids of pages that no query of the step sees may be
            anything and are not followed; an out-of-range id among those seen counts as masked.
        query_starts: ascending; padding sequences have no queries; tokens from ``query_starts[-1]`` give 0.
        kv_lens: tokens in the cache after this step's `kv_write`, at least the query length.
        scale: multiplies the scores.
        soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``.
        sliding_window: tokens a query sees, itself included; None = all before it.
        chunk_size: a query sees only keys of its own chunk, those with an equal ``position // chunk_size``.
        last_keys: position of the last key that each query sees: its own, or a later one that is cached; -1 where the
            result is not read and may be anything; None = its own. The only query of a sequence is its last token, so
            that position and -1 are all it can have: some versions skip it at -1, others do not look.
        sinks: a logit of each query head that takes its share of the softmax and gives nothing (GPT-OSS).
        max_query_len: static promise on the longest query run; 1 = decode only.
        plan: result of `plan_attention` for the same arguments, shared by several layers; None = make one per call.
        impl: see `pallas_kernels.platform.Impl`; None picks by platform. On GPUs the `xla` version also runs heads
            wider than 256, and all dtypes but float16 on compute capability 7.5.

    Raises:
        ValueError: when the view's shape does not fit the queries, `impl` does not take its dtype or takes no `plan`,
            or a `plan` was made without the `last_keys` that are given.
    """
    check_view(view, q.shape[1], q.shape[3])
    chosen = resolve_impl(impl)
    check_kernel(view, chosen)
    call = AttentionCall(
        q,
        view,
        layer,
        block_tables,
        query_starts,
        kv_lens,
        scale,
        soft_cap,
        sliding_window,
        chunk_size,
        sinks,
        last_keys,
        max_query_len,
    )
    if chosen != "gpu":
        return attend(call, chosen, plan)
    check_plan(plan, chosen)
    if not _gpu_takes(q, view):
        return xla.paged_attention(call)
    from pallas_kernels.paged_attention import gpu  # imports triton, which only a GPU's environment has

    return gpu.paged_attention(call)


def write_and_attend(
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
    plan: Plan | None = None,
    impl: Impl | None = None,
) -> tuple[
    Float[Array, "blocks layers kv_heads tiles block_size 128"], Float[Array, "tokens kv_heads q_per_kv head_dim"]
]:
    """Write K and V of sequences that decode, and attend, in one launch on TPUs; returns the view, in place when it is
    donated, and the attention.

    A sequence has one token at most, its last, and no other sequence has the block that it is written to. Bits are
    those of `kv_write` and then `paged_attention` with ``max_query_len=1``, whose arguments these are.

    Raises:
        ValueError: see `paged_attention`; or not `fuses_writes` of `impl`.
    """
    check_view(view, q.shape[1], q.shape[3])
    chosen = resolve_impl(impl)
    batch = (block_tables, query_starts, kv_lens)
    call = AttentionCall(q, view, layer, *batch, scale, soft_cap, sliding_window, chunk_size, sinks, max_query_len=1)
    return write_rows_and_attend(call, pack_kv(k, v), chosen, plan)


def write_rows_and_attend(call: AttentionCall, rows: Array, impl: Impl, plan: Plan | None) -> tuple[Array, Array]:
    """Write rows of any meaning, all tiles of all heads, and attend; see `write_and_attend`."""
    if not fuses_writes(impl):
        raise ValueError(f"impl={impl!r} does not write and attend in one launch: call kv_write and paged_attention")
    out, view = tpu.paged_attention(call, plan, new=rows, interpret=impl == "tpu_interpret")
    return view, out


def fuses_writes(impl: Impl | None) -> bool:
    """Tell whether there is `write_and_attend`, for TPUs only: elsewhere a write costs next to nothing."""
    return resolve_impl(impl) in ("tpu", "tpu_interpret")


def attend(call: AttentionCall, impl: Impl, plan: Plan | None) -> Float[Array, "tokens kv_heads q_per_kv value_dim"]:
    """Attend by one of the versions but `gpu`, which also take rows that are key and value at once.

    Raises:
        ValueError: see `paged_attention`.
    """
    check_plan(plan, impl)
    if impl == "reference":
        return reference.paged_attention(call)
    if impl in ("tpu", "tpu_interpret"):
        return tpu.paged_attention(call, plan, interpret=impl == "tpu_interpret")
    if impl == "cpu" and cpu.takes(call.view):
        return cpu.paged_attention(call)
    return xla.paged_attention(call)


def check_plan(plan: Plan | None, impl: Impl) -> None:
    """Raise ValueError if there is a plan for a version that takes none."""
    if plan is not None and impl not in ("tpu", "tpu_interpret"):
        raise ValueError(f"impl={impl!r} takes no plan: plan_attention makes none for it")


def _gpu_takes(q: Array, view: Array) -> bool:
    """Tell whether the Triton kernels attend to heads of this width and dtype."""
    return padded_head_dim(q.shape[3]) <= gpu_shapes.MAX_WIDTH and multiplies(q.dtype, view.dtype)


def plan_attention(
    view: Any,
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    *,
    tokens: int,
    q_per_kv: int,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    last_keys: Int[Array, " tokens"] | None = None,
    max_query_len: int | None = None,
    device_kind: str | None = None,
    tuning: Tuning | None = None,
    impl: Impl | None = None,
) -> Plan | None:
    """Precompute the part of `paged_attention` that depends on the batch alone, for the calls of all layers.

    Returns None for implementations that precompute nothing. Only the TPU version plans: there a small operation
    costs a layer as much as a large one.

    Args:
        view: the layer group's view; only its shape and dtype are used.
        tokens: rows of the batch.
        q_per_kv: query heads of a KV head.
        block_tables, query_starts, kv_lens, sliding_window, chunk_size, last_keys, max_query_len, impl: see
            `paged_attention`.
        device_kind: JAX's name of the TPUs, such as ``TPU v5 lite``; None = those of the mesh in use.
        tuning: sizes of the launches; None = those of `tpu_plan.tuning_of` for the devices.

    Raises:
        ValueError: when `impl` does not take the view, or the block tables in use at once do not fit in a TPU's
            scalar memory.
    """
    if resolve_impl(impl) not in ("tpu", "tpu_interpret"):
        return None
    return make_plan(
        block_tables,
        query_starts,
        kv_lens,
        view,
        tokens=tokens,
        q_per_kv=q_per_kv,
        reach=Reach(sliding_window, chunk_size),
        max_query_len=max_query_len,
        last_keys=last_keys,
        device_kind=device_kind,
        tuning=tuning,
    )

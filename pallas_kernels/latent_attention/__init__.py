"""Attends to latents scattered in blocks: the memory of DeepSeek-V2's multi-head latent attention (2024, section 2.1).

A token keeps one row, its latent and a rotary key, for all heads. In the absorbed form (section 2.1.2 of the paper)
each head's query is projected into the latents' space, where the row is its key and the row's first lanes, the latent,
its value: attention with one KV head, whose values are part of its keys. `latent_attention` and `latent_write` run the
kernels of `paged_attention` and `kv_write` on such a view (`pallas_kernels.layout`), except on GPUs, where a kernel of
its own reads each row once.
"""

from __future__ import annotations

import logging
from functools import cache

from jaxtyping import Array, Float, Int

from pallas_kernels.gpu_launch import has_matrix_units
from pallas_kernels.kv_codes import check_kernel
from pallas_kernels.kv_write import Runs, write_rows
from pallas_kernels.layout import check_latent_view, latent_tiles, pack_latents
from pallas_kernels.paged_attention import Plan, attend, check_plan, write_rows_and_attend
from pallas_kernels.paged_attention.reference import AttentionCall
from pallas_kernels.platform import Impl, resolve_impl

__all__ = ["latent_attention", "latent_write", "write_and_attend_to_latents"]

_log = logging.getLogger(__name__)


def latent_attention(
    q: Float[Array, "tokens heads width"],
    view: Float[Array, "blocks layers 1 tiles block_size 128"],
    layer: int | Int[Array, ""],
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    *,
    rank: int,
    scale: float,
    max_query_len: int | None = None,
    plan: Plan | None = None,
    impl: Impl | None = None,
) -> Float[Array, "tokens heads rank"]:
    """Attend causally from each token to its own sequence's latents, its own included.

    Args:
        q: queries in the latents' space, followed by their rotated part, like the rows of the view.
        view: a layer group's latents, laid out as `pallas_kernels.layout` says; only read.
        rank: width of the latent, the first lanes of a row, which are its value.
        layer, block_tables, query_starts, kv_lens, scale, max_query_len: see `paged_attention`.
        plan: what `plan_attention` made of the same arguments, all heads being queries of one KV head.
        impl: see `pallas_kernels.platform.Impl`; None picks by platform; ``gpu`` runs ``xla`` where a row is not powers
            of two of tiles, and on GPUs of compute capability 7.5, whose shared memory does not hold it.

    Raises:
        ValueError: when the view's shape does not fit the queries, `rank` is not from 1 to their width, or `impl` does
            not take the view's dtype or a `plan`.
    """
    width = q.shape[2]
    _check(view, width, rank)
    chosen = resolve_impl(impl)
    check_kernel(view, chosen)
    check_plan(plan, chosen)
    if chosen == "gpu" and not has_matrix_units():
        chosen = "xla"
    if chosen == "gpu" and not gpu_takes(width, rank):
        _say_once(width, rank)
        chosen = "xla"
    batch = (view, layer, block_tables, query_starts, kv_lens)
    if chosen == "gpu":
        from pallas_kernels.latent_attention import gpu  # imports triton, which only a GPU's environment has

        return gpu.latent_attention(q, *batch, rank=rank, scale=scale, max_query_len=max_query_len)
    call = AttentionCall(q[:, None], *batch, scale, max_query_len=max_query_len, value_dim=rank)
    return attend(call, chosen, plan)[:, 0]


def write_and_attend_to_latents(
    q: Float[Array, "tokens heads width"],
    view: Float[Array, "blocks layers 1 tiles block_size 128"],
    layer: int | Int[Array, ""],
    rows: Float[Array, "tokens width"],
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    *,
    rank: int,
    scale: float,
    plan: Plan | None = None,
    impl: Impl | None = None,
) -> tuple[Float[Array, "blocks layers 1 tiles block_size 128"], Float[Array, "tokens heads rank"]]:
    """Write the rows of sequences that decode, and attend; see `pallas_kernels.paged_attention.write_and_attend`, and
    for the arguments `latent_write` and `latent_attention`."""
    _check(view, q.shape[2], rank)
    batch = (view, layer, block_tables, query_starts, kv_lens)
    call = AttentionCall(q[:, None], *batch, scale, max_query_len=1, value_dim=rank)
    view, out = write_rows_and_attend(call, pack_latents(rows), resolve_impl(impl), plan)
    return view, out[:, 0]


def _check(view: Array, width: int, rank: int) -> None:
    """Raise ValueError unless a view holds rows of this width, with latents of that rank."""
    check_latent_view(view, width)
    if not 1 <= rank <= width:
        raise ValueError(f"rank={rank} must be from 1 to the queries' width {width}")


def latent_write(
    view: Float[Array, "blocks layers 1 tiles block_size 128"],
    layer: int | Int[Array, ""],
    rows: Float[Array, "tokens width"],
    slots: Int[Array, " tokens"],
    *,
    plan: Runs | None = None,
    impl: Impl | None = None,
) -> Float[Array, "blocks layers 1 tiles block_size 128"]:
    """Write each token's row to its slot of one layer; returns the view, in place when `view` is donated.

    Args:
        rows: latents, each followed by its rotated key.
        slots, plan: see `pallas_kernels.kv_write.kv_write`.
        impl: see `latent_attention`.

    Raises:
        ValueError: when the view's shape does not fit the rows, or `impl` does not take its dtype.
    """
    check_latent_view(view, rows.shape[1])
    chosen = resolve_impl(impl)
    check_kernel(view, chosen)
    # XLA scatters whole rows in place; the Triton kernel of `kv_write` takes K and V.
    chosen = "xla" if chosen == "gpu" else chosen
    return write_rows(view, layer, pack_latents(rows), slots, plan=plan, impl=chosen)


MAX_GPU_RANK = 512
"""Widest latent on a GPU, in lanes: 16 rows of values take 32 registers of each thread of eight warps."""


def gpu_takes(width: int, rank: int) -> bool:
    """Tell whether the Triton kernels take rows of `width` lanes: the latent, and the rest of a key after it, must both
    fill a power of two of tiles."""
    of_latent = latent_tiles(rank)
    rest = latent_tiles(width) - of_latent
    return rank <= MAX_GPU_RANK and of_latent & (of_latent - 1) == 0 and rest & (rest - 1) == 0


@cache
def _say_once(width: int, rank: int) -> None:
    _log.warning(
        "latent attention on a GPU: XLA's version runs, the Triton kernel takes no %d of %d lanes", rank, width
    )

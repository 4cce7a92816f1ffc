"""Keep the tokens of a prompt that its last queries look at most (SnapKV, arXiv 2404.14469; PyramidKV, 2406.02069).

`kv_select` moves the KV of the kept tokens of one sequence and layer to the front of its blocks; the blocks after
them become free for others. Each KV head chooses its tokens separately, by how much the sequence's last queries look at
each of them (`attention_scores`). Both are plain XLA operations for every platform; only the write picks a kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_codes import decode, has_scales, tokens_of
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layout import LANES, check_view, unpack_kv
from pallas_kernels.platform import Impl

__all__ = ["Keep", "attention_scores", "kv_select"]


class Keep(NamedTuple):
    """The tokens that are kept at any score, and the smoothing of scores; all static, in tokens.

    Attributes:
        first: the sequence's first tokens ("attention sinks").
        recent: the sequence's last tokens.
        pool: a token's score is the largest of so many around it (odd), so that neighbours are kept together.
    """

    first: int
    recent: int
    pool: int


def kv_select(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    q: Float[Array, "window kv_heads q_per_kv head_dim"],
    table: Int[Array, " pages"],
    length: Int[Array, ""],
    budget: Int[Array, ""],
    *,
    keep: Keep,
    most: int,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
    impl: Impl | None = None,
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """Return the view with `budget` of a sequence's `length` tokens in its first slots, in their order; in place when
    donated.

    It keeps the first ``keep.first`` tokens, the last ``keep.recent`` and, of those between, the ones with the highest
    `attention_scores` after smoothing; the earlier one among equals. The slots after the kept tokens hold no valid
    data. A sequence of at most `budget` tokens is not changed.

    Args:
        view: a layer group's KV memory, laid out as `pallas_kernels.layout` says, not of int8.
        layer: the layer's index in the view; may be traced.
        q: the queries of the sequence's last tokens, as `paged_attention` takes them.
        table: the sequence's blocks; entries after `length` tokens are not followed.
        budget: at least ``keep.first + keep.recent``; may be traced.
        most: static bound on `budget`.
        scale, soft_cap, sinks: as `paged_attention` takes them.
        impl: the implementation of `kv_write`.

    Raises:
        ValueError: when the view's shape does not fit the queries, or it holds int8 codes.
    """
    _, heads, _, head_dim = q.shape
    check_view(view, heads, head_dim)
    if has_scales(view.dtype):
        raise ValueError(f"kv_select takes no view of {view.dtype}: its tokens' scales lie in rows of their own")
    scores = attention_scores(view, layer, q, table, length, scale=scale, soft_cap=soft_cap, sinks=sinks)
    kept = kept_tokens(scores, length, budget, keep, most)
    k, v = unpack_kv(_rows(view, layer, table, kept), head_dim)
    nth = jnp.arange(kept.shape[1])
    block_size = tokens_of(view)
    moved = (nth < budget) & (length > budget)
    slots = jnp.where(moved, table[nth // block_size] * block_size + nth % block_size, view.shape[0] * block_size)
    # Without the barrier XLA:GPU could fuse the reads into the writes, and then has to write to a second pool.
    k, v = lax.optimization_barrier((k, v))
    return kv_write(view, layer, k, v, slots, impl=impl)


def kept_tokens(
    scores: Float[Array, "kv_heads keys"], length: Int[Array, ""], budget: Int[Array, ""], keep: Keep, most: int
) -> Int[Array, "kv_heads most"]:
    """Return the ascending positions of the tokens that each KV head keeps; from place `budget` on they mean
    nothing."""
    keys = scores.shape[1]
    most = min(most, keys)
    position = jnp.arange(keys)
    choice = position < length - keep.recent
    padding = [(0, 0), (keep.pool // 2, keep.pool // 2)]
    smooth = lax.reduce_window(jnp.where(choice, scores, -jnp.inf), -jnp.inf, lax.max, (1, keep.pool), (1, 1), padding)
    certain = (position < keep.first) | ~choice
    ranked = jnp.where(position < length, jnp.where(certain, jnp.inf, smooth), -jnp.inf)
    _, best = lax.top_k(ranked, most)
    return jnp.minimum(jnp.sort(jnp.where(jnp.arange(most) < budget, best, keys), axis=1), keys - 1)


def _rows(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    table: Int[Array, " pages"],
    kept: Int[Array, "kv_heads kept"],
) -> Float[Array, "kept kv_heads tiles 128"]:
    """Return the stored rows of each head's own tokens."""
    blocks, layers, heads, tiles, block_size, _ = view.shape
    page = jnp.minimum(kept // block_size, len(table) - 1)
    block = jnp.clip(table[page], 0, blocks - 1)
    head = jnp.arange(heads)[:, None]
    unit = ((block * layers + layer) * heads + head)[..., None] * tiles + jnp.arange(tiles)
    flat = view.reshape(blocks * layers * heads * tiles, block_size, LANES)
    rows = flat.at[unit, (kept % block_size)[..., None]].get(mode="promise_in_bounds")
    return decode(rows).swapaxes(0, 1)


_SPAN = 512
"""Keys whose K is in float32 at once."""


def attention_scores(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    q: Float[Array, "window kv_heads q_per_kv head_dim"],
    table: Int[Array, " pages"],
    length: Int[Array, ""],
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
) -> Float[Array, "kv_heads keys"]:
    """Return the attention weights that each cached token gets, summed over the last queries of the query heads of a KV
    head.

    Query i is that of token ``length - window + i`` and sees the tokens up to its own. The softmax runs in float32, in
    two passes over the keys: its statistics first, then the weights, so that no array of weights is held. Tokens from
    `length` on have 0; `keys` is the number of slots in the table, rounded up to whole spans.

    The arguments are those of `pallas_kernels.kv_select.kv_select`.
    """
    window, heads, q_per_kv, head_dim = q.shape
    blocks, layers, _, _, block_rows, lanes = view.shape
    block_size = tokens_of(view)
    per_span = min(max(1, _SPAN // block_size), len(table))
    span = per_span * block_size
    num_spans = -(-len(table) // per_span)
    table = jnp.pad(table, (0, num_spans * per_span - len(table)), constant_values=-1)
    flat = view.reshape(blocks * layers, heads, -1, block_rows, lanes)
    queries = scale * q.astype(jnp.float32).transpose(1, 0, 2, 3).reshape(heads, window * q_per_kv, head_dim)
    last_key = jnp.repeat(length - window + jnp.arange(window), q_per_kv)

    def logits(i: Int[Array, ""]) -> Float[Array, "kv_heads rows span"]:
        """Return the logits of all queries and the keys of a span; -inf where a query does not see a key."""
        block = jnp.clip(lax.dynamic_slice(table, (i * per_span,), (per_span,)), 0, blocks - 1)
        rows = decode(flat.at[block * layers + layer].get(mode="promise_in_bounds"))
        rows = rows.transpose(1, 0, 3, 2, 4).reshape(heads, span, -1, lanes)
        k, _ = unpack_kv(rows, head_dim)
        seen = i * span + jnp.arange(span) <= last_key[:, None]
        product = jnp.einsum("hrd,hkd->hrk", queries, jnp.where(_any(seen), k, 0), precision="highest")
        return jnp.where(seen, product if soft_cap is None else soft_cap * jnp.tanh(product / soft_cap), -jnp.inf)

    def statistics(i: Int[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
        top, total = state
        mine = logits(i)
        new_top = jnp.maximum(top, mine.max(axis=2))
        return new_top, total * jnp.exp(top - new_top) + jnp.exp(mine - new_top[..., None]).sum(axis=2)

    if sinks is None:
        state = jnp.full((heads, window * q_per_kv), -1e30), jnp.zeros((heads, window * q_per_kv))
    else:
        state = jnp.tile(sinks.astype(jnp.float32), (1, window)), jnp.ones((heads, window * q_per_kv))
    used = (length + span - 1) // span
    top, total = lax.fori_loop(0, used, statistics, state)

    def weigh(i: Int[Array, ""], scores: Array) -> Array:
        weights = jnp.exp(logits(i) - top[..., None]) / total[..., None]
        return lax.dynamic_update_slice(scores, weights.sum(axis=1), (0, i * span))

    return lax.fori_loop(0, used, weigh, jnp.zeros((heads, num_spans * span)))


def _any(seen: Array) -> Array:
    """Tell which keys any query sees, to be broadcast over heads and lanes; unseen memory may hold NaN."""
    return seen.any(axis=0)[None, :, None]

"""Moves, for prompts that end in a step, what a layer keeps of each to the first slots of its blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.execution.arrays import HostOrDevice
from jpaged.execution.caches.attend import Place
from jpaged.pyramid_kv import PyramidKV
from pallas_kernels.kv_select import Keep, kv_select
from pallas_kernels.platform import Impl


class Selection(NamedTuple):
    """Says what a layer has to choose.

    Attributes:
        ending: sequences of the batch whose prompt ends; the places behind them hold -1.
        budget: tokens that the layer keeps of a prompt.
    """

    ending: Int[HostOrDevice, " seqs"]
    budget: Int[Array, ""]


def select_kept(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    place: Place,
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    out: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    query_starts: Int[Array, " seqs+1"],
    sinks: Float[Array, "kv_heads q_per_kv"] | None,
    *,
    kv_budget: PyramidKV,
    most: int,
    scale: float,
    soft_cap: float | None,
    impl: Impl | None,
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """Return the view after `kv_select` of each prompt that ends, one after the other: there are few, and mostly none.

    Args:
        place: where the layer lies; its `extra` is a `Selection`.
        q, query_starts, sinks, scale, soft_cap: what `paged_attention` was given.
        out: what `paged_attention` gave.
        most: tokens that any layer keeps of a prompt.
    """
    window = kv_budget.window
    if len(q) < window:
        return view  # no prompt that is longer than a budget ends in so short a step
    keep = Keep(kv_budget.sinks, kv_budget.recent, kv_budget.pool)
    table, kv_lens = jnp.asarray(place.table), jnp.asarray(place.kv_lens)
    ending, budget = jnp.asarray(place.extra.ending), place.extra.budget

    def one(i: Array, rows: Array) -> Array:
        seq = ending[i]
        after = kv_select(
            rows.reshape(view.shape),
            place.layer,
            lax.dynamic_slice_in_dim(q, query_starts[seq + 1] - window, window),
            table[seq],
            kv_lens[seq],
            budget,
            keep=keep,
            most=most,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            impl=impl,
        )
        return after.reshape(rows.shape)

    # XLA:CPU copies the pool unless the loop depends on `out`, so that attention has surely read before: a zero that it
    # cannot foresee. And it carries a view, whose dimensions may be of size one, as a copy in another layout.
    zero = jnp.minimum(jnp.isnan(out[0, 0, 0, 0]).astype(jnp.int32), 0)
    rows = view.reshape(-1, view.shape[-1])
    return lax.fori_loop(zero, (ending >= 0).sum(), one, rows).reshape(view.shape)

"""Within a step, the prompts that end: what a layer keeps of each moves to the first slots of its blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.execution.arrays import HostOrDevice
from jpaged.execution.pool import PoolSpec
from pallas_kernels.kv_select import Keep, kv_select
from pallas_kernels.platform import Impl


class Selection(NamedTuple):
    """What a layer has to choose.

    Attributes:
        ending: see `KeptBatch`.
        budget: tokens that the layer keeps of a prompt.
    """

    ending: Int[HostOrDevice, " seqs"]
    budget: Int[Array, ""]


def select_kept(
    spec: PoolSpec,
    selection: Selection,
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: Int[Array, ""],
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    out: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    table: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None,
    impl: Impl | None,
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """The view after `kv_select` of each prompt that ends, one after the other: there are few, and mostly none.

    Args: of one layer, as `paged_attention` takes them; and `out`, what it gave.
    """
    kv_budget = spec.kv_budget
    assert kv_budget is not None, "there are selections where there is a budget"
    window = kv_budget.window
    if len(q) < window:
        return view  # no prompt that is longer than a budget ends in so short a step
    keep = Keep(kv_budget.sinks, kv_budget.recent, kv_budget.pool)
    most = max(band.prompt_budget or 0 for band in spec.groups)
    ending = jnp.asarray(selection.ending)

    def one(i: Array, rows: Array) -> Array:
        seq = ending[i]
        after = kv_select(
            rows.reshape(view.shape),
            layer,
            lax.dynamic_slice_in_dim(q, query_starts[seq + 1] - window, window),
            table[seq],
            kv_lens[seq],
            selection.budget,
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

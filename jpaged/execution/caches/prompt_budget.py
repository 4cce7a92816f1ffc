"""Computes full attention that keeps part of a prompt (PyramidKV): bands of layers have budgets of their own.

The bands are one layer group to the model, whose layers one loop may run, and several to the pool. Their views have
one shape, so that a layer's number may be traced: it picks among the bands' tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.execution.caches.attention import FullAttentionCache, Place, PreparedKernels, attend, write_slots
from jpaged.execution.caches.base import HostStep, LayerCall, Pool
from jpaged.execution.mesh import HostOrDevice
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import PromptBudget
from jpaged.pyramid_kv import PromptBudgetGroup, PyramidKV
from pallas_kernels.kv_select import Keep, kv_select
from pallas_kernels.platform import Impl


class PromptBudgetBatch(NamedTuple):
    """Holds a step's arrays for layers with budgets.

    Attributes:
        tables, slots: tables and slots of each band, see `AttentionBatch`.
        dropped: tokens of each sequence's prompt that a band keeps no more; its tokens lie so many slots before their
            positions.
        ending: sequences of the batch whose prompt ends with this step and is longer than some band keeps; the places
            after them hold -1.
    """

    tables: Int[HostOrDevice, "bands seqs pages"]
    slots: Int[HostOrDevice, "bands tokens"]
    dropped: Int[HostOrDevice, "bands seqs"]
    ending: Int[HostOrDevice, " seqs"]


@dataclass(frozen=True)
class PromptBudgetCache(FullAttentionCache):
    """Serves layers that keep a budget of each prompt's tokens and all tokens that follow."""

    group: PromptBudgetGroup
    Batch = PromptBudgetBatch
    skips_unread_rows = False  # a prompt's last queries choose what is kept, whether or not their results are read
    by_token = None  # a prompt's last queries choose together
    follows = False

    @property
    def budgets(self) -> tuple[int, ...]:
        """Return how many of a prompt's tokens the layers of each band keep."""
        return tuple(band.budget for band in self.group.bands(self.format.block_size))

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        bands = self.group.bands(self.format.block_size)
        return tuple(
            self.spec(
                band.name,
                len(band.layers),
                PromptBudget(band.budget, self.group.kv_budget.window),
                least_layers=len(bands[0].layers),
            )
            for band in bands
        )

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], layouts: Sequence[GroupLayout]) -> Any:
        dropped, ending = cut_prompts(step, self.budgets)
        slots = [
            write_slots(step, table, layout, step.positions - of_band[step.seq_of_token])
            for table, layout, of_band in zip(tables, layouts, dropped, strict=True)
        ]
        return PromptBudgetBatch(np.stack(tables), np.stack(slots), dropped, ending)

    def prepare(self, call: LayerCall, num_tokens: int) -> PreparedKernels:
        return PreparedKernels()  # a layer's band says which tables are its own

    def operate(
        self,
        call: LayerCall,
        pool: Pool,
        index: int | Int[Array, ""],
        q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"] | None,
        v: Float[Array, "tokens kv_heads head_dim"] | None,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
        last_keys: Int[Array, " tokens"] | None = None,
        seen: Int[Array, " tokens"] | None = None,
        sees_ahead: bool = False,
    ) -> tuple[Pool, Float[Array, "tokens kv_heads q_per_kv head_dim"]]:
        """Attend; at the end of a prompt, move the tokens that the layer keeps to the prompt's first slots.

        Raises:
            ValueError: there are `last_keys`, `seen` or `sees_ahead`.
        """
        if last_keys is not None or seen is not None or sees_ahead:
            raise ValueError(
                "last_keys, seen and sees_ahead are not taken by layers that keep a budget of each prompt's tokens"
            )
        arrays, budgets = call.arrays, self.budgets
        band, layer = jnp.divmod(jnp.asarray(index, jnp.int32), self.pool_groups()[0].num_layers)
        place = Place(
            layer,
            jnp.asarray(arrays.tables)[band],
            jnp.asarray(arrays.slots)[band],
            call.kv_lens - jnp.asarray(arrays.dropped)[band],
            Selection(arrays.ending, jnp.asarray(budgets, jnp.int32)[band]),
        )
        finish = None
        if call.max_query_len != 1:
            finish = partial(
                select_kept,
                kv_budget=self.group.kv_budget,
                most=max(budgets),
                scale=scale,
                soft_cap=soft_cap,
                impl=call.impl,
            )
        return attend(
            call, pool, place, q, k, v, scale=scale, soft_cap=soft_cap, sinks=sinks, mask=self.mask, finish=finish
        )


def cut_prompts(
    step: HostStep, budgets: tuple[int, ...]
) -> tuple[Int[np.ndarray, "bands seqs"], Int[np.ndarray, " seqs"]]:
    """Return how far each sequence's tokens have moved up in each band, and which prompts the step cuts; see
    `PromptBudgetBatch`."""
    dropped = np.zeros((len(budgets), step.padded_seqs), np.int32)
    prompts = np.array([chunk.seq.num_prompt for chunk in step.chunks], np.int32)
    too_long = np.maximum(0, prompts - np.array(budgets, np.int32)[:, None])
    dropped[:, : len(prompts)] = np.where(step.starts >= prompts, too_long, 0)
    ending = np.full(step.padded_seqs, -1, np.int32)
    stops = step.starts + step.lengths
    (rows,) = np.nonzero((step.starts < prompts) & (stops == prompts) & (prompts > min(budgets)))
    ending[: len(rows)] = rows
    return dropped, ending


class Selection(NamedTuple):
    """The choice that a layer has to make.

    Attributes:
        ending: sequences of the batch whose prompt ends; the places after them hold -1.
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

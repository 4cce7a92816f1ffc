"""Computes attention over what each token's own sequence keeps: full, within a sliding window, within chunks.

Layers that share the KV of others (cross-layer attention) are of the same kinds: they bring no K and V, and only read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.execution.caches.attend import AttentionPlan, Mask, Place, attend, plan_of_slots
from jpaged.execution.caches.base import HostStep, LayerCall, Pool, Reads
from jpaged.execution.caches.token_slots import TokenSlots, last_keys
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import ChunkedLocalAttention, FullAttention, Policy, SlidingWindow
from jpaged.model_api import AttentionGroup
from pallas_kernels.layout import view_shape


@dataclass(frozen=True)
class AttentionCache(TokenSlots):
    """Serves layers that keep K and V of each token in its block."""

    group: AttentionGroup
    leaves_out_unread: ClassVar[bool] = True

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """Return the policy that says which blocks the layers still need."""

    @property
    def mask(self) -> Mask:
        """Return which tokens the layers' queries see, as arguments of the kernels."""
        return {}

    @property
    def layer_shape(self) -> tuple[int, ...]:
        group, form = self.group, self.format
        heads = group.kv_heads // form.shards
        return view_shape(1, 1, heads, group.head_dim, form.block_size, form.dtype, form.tile)[2:]

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], plans: Sequence[GroupLayout]) -> Any:
        arrays = super().batch(step, tables, plans)
        return arrays._replace(last_keys=last_keys(step)) if self.group.sees_images else arrays

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        return (self.spec(self.group.name, len(self.group.layers), self.policy),)

    def reads(self) -> Reads:
        group = self.group
        token_bytes = sum(spec.real_bytes / spec.block_size for spec in self.pool_groups())
        mask = self.mask
        return Reads(
            token_bytes * (1 + group.readers / len(group.layers)),
            mask.get("sliding_window") or mask.get("chunk_size"),
            (len(group.layers) + group.readers) * group.head_dim,
        )

    def plan(self, call: LayerCall, num_tokens: int) -> AttentionPlan:
        return plan_of_slots(call, self.format.dtype, num_tokens, self.group.q_per_kv, self.mask)

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
    ) -> tuple[Pool, Float[Array, "tokens kv_heads q_per_kv head_dim"]]:
        table, slots, seen_last = call.arrays
        if last_keys is not None:
            seen_last = last_keys if seen_last is None else jnp.where(last_keys < 0, -1, seen_last)
        plan = call.plan or AttentionPlan()
        place = Place(jnp.asarray(index, jnp.int32), table, slots, call.kv_lens, last_keys=seen_last, plan=plan)
        return attend(call, pool, place, q, k, v, scale=scale, soft_cap=soft_cap, sinks=sinks, mask=self.mask)


class FullAttentionCache(AttentionCache):
    """Serves layers whose queries see all tokens before them."""

    @property
    def policy(self) -> Policy:
        return FullAttention()


class SlidingWindowCache(AttentionCache):
    """Serves layers whose queries see the last tokens, their own included; blocks behind the window are given up."""

    @property
    def policy(self) -> Policy:
        assert self.group.sliding_window is not None
        return SlidingWindow(self.group.sliding_window)

    @property
    def mask(self) -> Mask:
        return {"sliding_window": self.group.sliding_window}


class ChunkedAttentionCache(AttentionCache):
    """Serves layers whose queries see the tokens of their own chunk; blocks of the chunks before are given up."""

    @property
    def policy(self) -> Policy:
        assert self.group.chunk_size is not None
        return ChunkedLocalAttention(self.group.chunk_size)

    @property
    def mask(self) -> Mask:
        return {"chunk_size": self.group.chunk_size}

"""Shared parts of mixtures of experts: where experts lie, and tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jpaged.model_api import TENSOR_AXIS, padded

from .weights import Padded

Tables = Any
"""A tree of arrays, quantised matrices and banks, whose first axis is experts."""


@dataclass(frozen=True)
class ExpertLayout:
    """Says how a layer's experts lie on the devices of the tensor axis.

    Attributes:
        experts: how many a layer has.
        devices: how many the tensor axis has.
        whole: each device holds whole experts, an equal number (GShard; Lepikhin et al., 2020). Else it holds an equal
            share of every expert's columns.

    Raises:
        ValueError: whole experts do not divide over the devices.
    """

    experts: int
    devices: int
    whole: bool

    def __post_init__(self) -> None:
        if self.whole and self.experts % self.devices:
            raise ValueError(
                f"enable_expert_parallel=True: {self.experts} experts do not divide over "
                f"tensor_parallel_size={self.devices} devices"
            )

    @property
    def column_shards(self) -> int:
        """Return the number of parts that an expert's columns are cut into."""
        return 1 if self.whole else self.devices

    def columns(self, count: int, unit: int) -> Padded:
        """Return an expert's columns, of which a device has a multiple of `unit` where that adds at most a third."""
        own = -(-count // self.column_shards)
        return Padded(count, self.column_shards, unit=unit if 3 * (padded(own, unit) - own) <= own else 1)

    def partition(self, *columns: str | None) -> P:
        """Return how a table whose first axis is experts is split: by experts, or by its `columns`."""
        return P(TENSOR_AXIS, *(None,) * (len(columns) - 1)) if self.whole else P(*columns)

    @property
    def first_here(self) -> int | Int[Array, ""]:
        """Return the number of this device's first expert. Read by each device for itself."""
        own = self.experts // self.devices
        return jax.lax.axis_index(TENSOR_AXIS) * own if self.whole and self.devices > 1 else 0

    @property
    def adds_bias(self) -> bool | Bool[Array, ""]:
        """Tell whether this device adds its experts' last biases: of several that have columns of each, the first one.
        Read by each device for itself."""
        return True if self.column_shards == 1 else jax.lax.axis_index(TENSOR_AXIS) == 0

    def total(self, part: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        """Return the sum of all devices' parts. Called by each device for itself."""
        return part if self.devices == 1 else jax.lax.psum(part, TENSOR_AXIS)

    def mix(
        self,
        mlps: Callable[[Array, Array, Array, Tables], Array],
        x: Float[Array, "tokens embed"],
        share: Float[Array, "tokens per_token"],
        chosen: Int[Array, "tokens per_token"],
        tables: Tables,
    ) -> Float[Array, "tokens embed"]:
        """Return ``mlps(x, share, chosen, tables)``, summed over devices if each holds different experts.

        There `mlps` is given a device's tables, and `chosen` counts from its first expert; other devices' experts
        get the number after its last. Called under a mesh (`jax.sharding.use_abstract_mesh`).
        """
        if not self.whole or self.devices == 1:
            return mlps(x, share, chosen, tables)

        def on_device(x: Array, share: Array, chosen: Array, tables: Tables) -> Array:
            own = self.experts // self.devices
            number = chosen - self.first_here
            number = jnp.where((number >= 0) & (number < own), number, own)
            return self.total(mlps(x, share, number, tables))

        by_expert = jax.tree.map(lambda leaf: P(TENSOR_AXIS) if jnp.ndim(leaf) else P(), tables)
        spread = jax.shard_map(
            on_device, in_specs=(P(), P(), P(), by_expert), out_specs=P(), axis_names={TENSOR_AXIS}, check_vma=False
        )
        return spread(x, share, chosen, tables)


class Dispatch(NamedTuple):
    """Lists the pairs of a token and one of its experts, sorted by expert.

    Attributes:
        pair: which pair a row is, of all in the order of tokens.
        token: each row's token.
        expert: each row's expert; rows of experts that are not here come last, with numbers above.
        counts: how many rows each expert has.
    """

    pair: Int[Array, " rows"]
    token: Int[Array, " rows"]
    expert: Int[Array, " rows"]
    counts: Int[Array, " experts"]

    @property
    def is_here(self) -> Bool[Array, " rows"]:
        """Tell whether the row's expert is one of those counted."""
        return self.expert < len(self.counts)

    def combine(
        self, rows: Float[Array, "rows embed"], into: Float[Array, "tokens embed"]
    ) -> Float[Array, "tokens embed"]:
        """Return for each token the sum of its rows; rows whose expert is not here count as zero.

        `into` gives the result's shape and dtype.
        """
        rows = jnp.where(self.is_here[:, None], rows, 0)
        return jnp.zeros_like(into).at[self.token].add(rows)


def by_expert(chosen: Int[Array, "tokens per_token"], experts: int) -> Dispatch:
    """Sort pairs by expert: rows of the first `experts` experts, then those of others, which are not counted."""
    flat = chosen.reshape(-1)
    pair = jnp.argsort(flat)
    return Dispatch(pair, pair // chosen.shape[1], flat[pair], jnp.bincount(flat, length=experts))

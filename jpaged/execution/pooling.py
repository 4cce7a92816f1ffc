"""Keeps the hidden states of a step, and sums them for requests that ask for one vector of their prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.execution.mesh import HostOrDevice
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import Chunk, ScheduledStep


class HiddenStates:
    """Holds the hidden states of a step, which several launches may have computed, each some of its tokens."""

    def __init__(self) -> None:
        self._parts: list[jax.Array] = []
        self._rows: Int[np.ndarray, " tokens"] | None = None
        self._computed = 0

    def begin(self, tokens: int | None = None) -> None:
        """Forget the step before.

        Args:
            tokens: how many the step has, where launches compute them in another order; see `expect`.
        """
        self._parts, self._computed = [], 0
        self._rows = None if tokens is None else np.zeros(tokens, np.int32)

    def expect(self, tokens: range, computed: int) -> None:
        """Take note that the next launch computes these tokens of the step, as the first of `computed` rows."""
        assert self._rows is not None, "begin() was called without a number of tokens"
        self._rows[tokens.start : tokens.stop] = self._computed + np.arange(len(tokens))
        self._computed += computed

    def add(self, states: Float[jax.Array, "rows embed"]) -> None:
        """Add the result of a launch."""
        self._parts.append(states)

    def whole(self) -> Float[jax.Array, "rows embed"]:
        """Return the rows of all launches, one after another."""
        if len(self._parts) > 1:
            self._parts = [jnp.concatenate(self._parts)]
        return self._parts[0]

    def rows_of(self, tokens: Int[np.ndarray, " some"]) -> Int[np.ndarray, " some"]:
        """Return where in `whole` some of the step's tokens are."""
        return tokens if self._rows is None else self._rows[tokens]

    def by_row(self, owners: Int[np.ndarray, " tokens"], size: int) -> Int[np.ndarray, " rows"]:
        """Return the owner of each row of `whole`, given the owners of the step's tokens; rows from `size` on have
        none."""
        if self._rows is None:
            return owners
        owned = owners < size
        by_row = np.full(len(self.whole()), size, np.int32)
        by_row[self._rows[owned]] = owners[owned]
        return by_row


def make_pool_hidden(mesh: Mesh) -> jax.stages.Wrapped:
    """Return ``pool(hidden, owners, size=..., largest=...) -> [size, embed]``: float32 sums of the rows of each owner,
    or the largest of each column; rows whose owner is `size` are in none."""

    def pool(
        hidden: Float[Array, "tokens embed"], owners: Int[HostOrDevice, " tokens"], *, size: int, largest: bool
    ) -> Float[Array, "size embed"]:
        pooled = jax.ops.segment_max if largest else jax.ops.segment_sum
        return pooled(hidden.astype(jnp.float32), jnp.asarray(owners), num_segments=size + 1)[:size]

    return jax.jit(pool, static_argnames=("size", "largest"), out_shardings=NamedSharding(mesh, PartitionSpec()))


def owners_of_rows(
    step: ScheduledStep, query_starts: Int[np.ndarray, " seqs+1"], size: int, width: int
) -> Int[np.ndarray, " width"]:
    """Return which of `step.pooled` each of the step's `width` rows belongs to; `size` where it belongs to none.

    Of a request that asks for its first or last token there is one row.
    """
    first_row = {chunk.seq.seq_id: int(query_starts[i]) for i, chunk in enumerate(step.chunks)}
    owners = np.full(width, size, np.int32)
    for number, (request, chunk) in enumerate(step.pooled):
        start = first_row[chunk.seq.seq_id]
        stop = start + chunk.length
        first = stop - 1 if request.pooling == "last" else start
        owners[first : start + 1 if request.pooling == "cls" else stop] = number
    return owners


@dataclass(frozen=True)
class PooledStates:
    """Holds pooled hidden states on their way from the device, `fetch`ed as `Worker` says.

    Attributes:
        sums: sums of each chunk's rows; None if no request asks for one.
        largest: the largest of each of their columns; None likewise.
    """

    chunks: Sequence[tuple[Request, Chunk]]
    sums: jax.Array | None
    largest: jax.Array | None
    fetch: Callable[[Any], Any]

    def wait(self) -> list[tuple[Request, int, int, np.ndarray]]:
        """Return each chunk's request, first position, the position after its last, and sum or maximum; blocks until
        the device is done."""
        sums, largest = self.fetch((self.sums, self.largest))
        return [
            (
                request,
                chunk.start,
                chunk.start + chunk.length,
                np.array((largest if request.pooling == "max" else sums)[number]),
            )
            for number, (request, chunk) in enumerate(self.chunks)
        ]

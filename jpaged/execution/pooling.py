"""Keeps the hidden states of a step, and sums them for requests that ask for one vector of their prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jpaged.execution.batch import StepBatch
from jpaged.execution.mesh import HostOrDevice, each_replica, own_sharding, stack
from jpaged.execution.packing import opened
from jpaged.execution.readouts.base import Device, ForwardPass, first_rows, of_replica
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import ScheduledStep


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

    def pools(hidden: Array, owners: Array, *, size: int, largest: bool) -> Array:
        return each_replica(partial(pool, size=size, largest=largest), mesh, ("own", "own"), "own")(hidden, owners)

    return jax.jit(pools, static_argnames=("size", "largest"), out_shardings=own_sharding(mesh))


class PooledStates:
    """Holds the pooled hidden states of all replicas' steps on their way from the device, `fetch`ed as `Worker` says.

    Args:
        steps: one of each replica.
        sums: sums of each chunk's rows; None if no request asks for one.
        largest: the largest of each of their columns; None likewise.
    """

    field = "pooled"

    def __init__(
        self,
        steps: Sequence[ScheduledStep],
        sums: jax.Array | None,
        largest: jax.Array | None,
        fetch: Callable[[Any], Any],
    ) -> None:
        self._steps = steps
        self._wanted = sums, largest
        self._fetch = fetch

    @cached_property
    def _arrays(self) -> tuple[Any, Any]:
        return self._fetch(self._wanted)

    def wait(self, replica: int) -> list[tuple[Request, int, int, np.ndarray]]:
        """Return each chunk's request, first position, the position after its last, and sum or maximum; blocks until
        the device is done."""
        by_mode: list[Any] = [
            array if array is None else of_replica(array, replica, len(self._steps)) for array in self._arrays
        ]
        return [
            (request, chunk.start, chunk.start + chunk.length, np.array(by_mode[request.pooling == "max"][number]))
            for number, (request, chunk) in enumerate(self._steps[replica].pooled)
        ]


class PromptPooling:
    """Sums the hidden states of requests that ask for one vector of their prompt.

    Args:
        size: most chunks of a step.
    """

    def __init__(self, mesh: Mesh, size: int) -> None:
        self._mesh = mesh
        self._size = size

    def start(self, device: Device, forward: ForwardPass) -> PooledStates | None:
        """Sum the rows of each chunk that is part of a vector."""
        modes = {request.pooling for step in forward.steps for request, _ in step.pooled}
        if not modes:
            return None
        each = zip(forward.steps, forward.batches, strict=True)
        owners = stack(self._mesh, [owners_of_rows(step, opened(batch), self._size) for step, batch in each])
        sums = device.pool_hidden(owners, self._size, False) if modes != {"max"} else None
        largest = device.pool_hidden(owners, self._size, True) if "max" in modes else None
        return PooledStates(forward.steps, sums, largest, device.fetch)


def owners_of_rows(step: ScheduledStep, batch: StepBatch, size: int) -> Int[np.ndarray, " tokens"]:
    """Return which of `step.pooled` each row of the step's batch belongs to; `size` where it belongs to none.

    Of a request that asks for its first or last token there is one row.
    """
    first_row = first_rows(step, batch)
    owners = np.full(len(batch.tokens), size, np.int32)
    for number, (request, chunk) in enumerate(step.pooled):
        start = first_row[chunk.seq.seq_id]
        stop = start + chunk.length
        first = stop - 1 if request.pooling == "last" else start
        owners[first : start + 1 if request.pooling == "cls" else stop] = number
    return owners

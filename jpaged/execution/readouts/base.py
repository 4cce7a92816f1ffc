"""Reads forward passes: a `Readout` is one kind of result, which the device computes of a pass's hidden states.

The runner starts every kind in the same way, for all replicas at once, and the engine reads them back when the device
is done. A new kind is one class, given to the runner's list, and a field of `StepResults`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Int

from jpaged.execution.batch import StepBatch
from jpaged.execution.packing import Packed
from jpaged.execution.sampling.sample_step import StepOutput
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import PromptScore, ScheduledStep
from jpaged.scheduling.top_tokens import TokenRanking, TopTokens

Sampled = tuple[list[int], list[float], TopTokens | None]
"""Tokens, log-probabilities and, if a request needs them, the most likely tokens, one per scheduled sample."""


class Device(Protocol):
    """Has the calls that read hidden states, see `Worker`."""

    fetch: Callable[[Any], Any]

    def score(
        self, rows: Int[np.ndarray, "*replicas rows"], targets: Int[np.ndarray, "*replicas rows"], top: int, /
    ) -> Any:
        """See `Worker.score`."""

    def pool_hidden(self, owners: Int[np.ndarray, "*replicas tokens"], size: int, largest: bool) -> jax.Array:
        """See `Worker.pool_hidden`."""

    def draw(self, args: SamplingArrays, top: int) -> StepOutput:
        """See `Worker.draw`."""


class ForwardPass(NamedTuple):
    """A forward pass of all replicas, once it was dispatched.

    Attributes:
        steps: one of each replica.
        batches: their arrays.
        on_draw: called with the arguments and results of the draw, which is then made in any case; None = nothing is.
    """

    steps: Sequence[ScheduledStep]
    batches: Sequence[StepBatch | Packed]
    on_draw: Callable[[SamplingArrays, int, StepOutput], None] | None = None


class Reading(Protocol):
    """The results of one kind, on their way from the device.

    Attributes:
        field: which field of `StepResults` they are.
    """

    field: str

    def wait(self, replica: int) -> Any:
        """Return the results of a replica's step; blocks until the device is done."""


class Readout(Protocol):
    """One kind of result that requests ask for."""

    def start(self, device: Device, forward: ForwardPass) -> Reading | None:
        """Start to compute the results of a pass; None where no request asks for any."""


class StepResults(NamedTuple):
    """The results of a step, on the host.

    Attributes:
        sampled: the draws, one per scheduled sample.
        scores: scored prompt tokens with their log-probabilities and rankings.
        pooled: of each chunk its request, first position, the position after its last, and the sum of hidden states.
    """

    sampled: Sampled
    scores: Sequence[tuple[PromptScore, float, TokenRanking]] = ()
    pooled: Sequence[tuple[Request, int, int, np.ndarray]] = ()


class Readings:
    """The results of a pass over the steps of all replicas, whose computation is started once.

    Args:
        start: starts it.
    """

    def __init__(self, start: Callable[[], Sequence[Reading]]) -> None:
        self._start = start
        self._made: Sequence[Reading] | None = None

    @property
    def is_started(self) -> bool:
        return self._made is not None

    def start(self) -> None:
        """Start to compute the results, unless that was done; the pass must be the last one that was dispatched."""
        if self._made is None:
            self._made = self._start()

    def wait(self, replica: int) -> StepResults:
        """Return the results of a replica's step; blocks until the device is done."""
        assert self._made is not None, "start comes before wait"
        return StepResults(**{reading.field: reading.wait(replica) for reading in self._made})


@dataclass(frozen=True)
class InFlight:
    """Holds a dispatched step of a replica whose results may not exist yet."""

    step: ScheduledStep
    readings: Readings
    replica: int = 0

    @property
    def is_started(self) -> bool:
        """Tell whether its results are being computed; if not, `start` is still to be called."""
        return self.readings.is_started

    def start(self) -> None:
        """Start to compute the results of the pass, for all replicas; see `Readings.start`."""
        self.readings.start()

    def read_back(self) -> StepResults:
        """Return all that the step computed; blocks until the device is done."""
        return self.readings.wait(self.replica)


def first_rows(step: ScheduledStep, batch: StepBatch) -> dict[int, int]:
    """Return in which row of the batch each sequence of the step begins, by seq_id."""
    starts = np.asarray(batch.query_starts)
    return {chunk.seq.seq_id: int(start) for chunk, start in zip(step.chunks, starts, strict=False)}


def of_replica(array: Any, replica: int, number: int) -> Any:
    """Return a replica's part of an array that holds one for each of `number` replicas; that of one is the array."""
    return array if number == 1 else array[replica]

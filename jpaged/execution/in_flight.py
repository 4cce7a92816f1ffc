"""What a step leaves on the device, until the host asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jpaged.execution.pooling import PooledStates
from jpaged.execution.sampling.prompt_scores import PromptScores
from jpaged.execution.sampling.sample_step import StepOutput
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import PromptScore, ScheduledStep
from jpaged.scheduling.top_tokens import TokenRanking, TopTokens


class Draw:
    """Holds what the sampler gives all replicas, on its way from the device.

    Args:
        fetch: see `Worker`.
        ranked: whether somebody asked for the most likely tokens.
    """

    def __init__(self, output: StepOutput, fetch: Callable[[Any], Any], *, ranked: bool) -> None:
        self._wanted = tuple(output) if ranked else (output.tokens, output.logprobs)
        self._fetch = fetch

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the arrays on the host, the first two fields of `StepOutput` or all; blocks until the device is
        done."""
        return self._fetch(self._wanted)


class StepResults(NamedTuple):
    """Holds what a step computed, on the host.

    Attributes:
        sampled: tokens, log-probabilities and, where a request asked for them, the most likely tokens, one a scheduled
            sample.
        scores: scored prompt tokens with their log-probabilities and rankings.
        pooled: of each chunk its request, first position, the position after its last, and the sum of hidden states.
    """

    sampled: tuple[list[int], list[float], TopTokens | None]
    scores: list[tuple[PromptScore, float, TokenRanking]]
    pooled: list[tuple[Request, int, int, np.ndarray]]


@dataclass(frozen=True)
class InFlight:
    """Is a dispatched step whose results may not exist yet.

    Attributes:
        replica: whose step it is; None where there is one.
        scores: scores of prompt tokens, where a request asked for them.
        pooled: sums of hidden states, where a request asked for a vector of its prompt.
    """

    step: ScheduledStep
    draw: Draw
    replica: int | None = None
    scores: PromptScores | None = None
    pooled: PooledStates | None = None

    def read_back(self) -> StepResults:
        """Return all that the step computed; blocks until the device is done."""
        scores = [] if self.scores is None else self.scores.wait()
        pooled = [] if self.pooled is None else self.pooled.wait()
        return StepResults(self.wait(), scores, pooled)

    def wait(self) -> tuple[list[int], list[float], TopTokens | None]:
        """Return the sampled (tokens, logprobs, most likely tokens where a request asked for them), one a scheduled
        sample; blocks until the device is done."""
        arrays = self.draw.arrays if self.replica is None else [x[self.replica] for x in self.draw.arrays]
        tokens, logprobs, *top = (x[: len(self.step.samples)] for x in arrays)
        return tokens.tolist(), logprobs.tolist(), TopTokens(*top) if self.step.num_top else None

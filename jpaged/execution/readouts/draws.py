"""Draws the next tokens of a forward pass of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from jax.sharding import Mesh

from jpaged.execution.compile.buckets import Buckets
from jpaged.execution.mesh import num_replicas
from jpaged.execution.readouts.base import Device, ForwardPass, Sampled, of_replica
from jpaged.execution.sampling.sample_step import Drawn, StepOutput
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.sampling.sampling_batch import SamplerRows, of_all, top_size, with_room
from jpaged.scheduling.step import ScheduledStep
from jpaged.scheduling.top_tokens import TopTokens


class Draw:
    """The sampler's results for all replicas, on their way from the device.

    Args:
        steps: one of each replica.
        fetch: see `Worker`.
        is_ranked: whether a row may ask for the most likely tokens.
    """

    field = "sampled"

    def __init__(
        self, steps: Sequence[ScheduledStep], output: StepOutput, fetch: Callable[[Any], Any], *, is_ranked: bool
    ) -> None:
        self._steps = steps
        self._output = output
        self._fetch = fetch
        self._is_ranked = is_ranked

    @cached_property
    def _words(self) -> Any:
        return self._fetch(self._output.words)

    def wait(self, replica: int) -> Sampled:
        step = self._steps[replica]
        words = of_replica(self._words, replica, len(self._steps))
        tokens, logprobs, *top = Drawn.read(words[: step.num_samples])
        ranked = self._is_ranked and step.num_top
        return tokens.tolist(), logprobs.tolist(), TopTokens(*top) if ranked else None


class NoDraw:
    """Stands for the draws of steps whose requests read no token of them: nothing is computed, all tokens are 0."""

    field = "sampled"

    def __init__(self, steps: Sequence[ScheduledStep]) -> None:
        self._steps = steps

    def wait(self, replica: int) -> Sampled:
        number = self._steps[replica].num_samples
        return [0] * number, [0.0] * number, None


class Draws:
    """Makes the draws of each forward pass, with as many rows as are sampled.

    Args:
        deterministic: whether the sampler is always the one that ranks.
        is_ready: tells whether a draw by these arguments need not wait for a compiler.
        lacks: called with the arguments and the number of ranked tokens of a draw that a larger one stands in for.
    """

    def __init__(
        self,
        mesh: Mesh,
        buckets: Buckets,
        vocab_size: int,
        *,
        deterministic: bool,
        is_ready: Callable[[SamplingArrays, int], bool],
        lacks: Callable[[SamplingArrays, int], None],
    ) -> None:
        self._mesh = mesh
        self._buckets = buckets
        self._vocab_size = vocab_size
        self._rows = [SamplerRows(vocab_size) for _ in range(num_replicas(mesh))]
        self._deterministic = deterministic
        self._is_ready = is_ready
        self._lacks = lacks

    def start(self, device: Device, forward: ForwardPass) -> Draw | NoDraw:
        """Draw after each sample of the pass; where the fitting shape is not ready, in a larger one that is."""
        steps = forward.steps
        if forward.on_draw is None and not any(step.reads_draws for step in steps):
            return NoDraw(steps)
        sizes = self._buckets.samples_holding(max(step.num_samples for step in steps))
        args = with_room(sizes, partial(self._arrays, steps))
        ranked = _ranked(steps)
        # The plain variant may add up in another order.
        top = 0 if args.plain and not self._deterministic else ranked
        if not self._is_ready(args, top):
            for rows in sizes[sizes.index(args.position.shape[-1]) :]:
                larger = self._arrays(steps, rows)
                found = next((which for which in (top, ranked) if self._is_ready(larger, which)), None)
                if found is not None:
                    self._lacks(args, top)
                    args, top = larger, found
                    break
        output = device.draw(args, top)
        if forward.on_draw is not None:
            forward.on_draw(args, top, output)
        return Draw(steps, output, device.fetch, is_ranked=bool(top))

    def _arrays(self, steps: Sequence[ScheduledStep], rows: int) -> SamplingArrays:
        """Return the sampler's arguments for a number of rows."""
        each = [of.arrays(step, rows) for of, step in zip(self._rows, steps, strict=True)]
        return of_all(self._mesh, each, self._vocab_size)


def _ranked(steps: Sequence[ScheduledStep]) -> int:
    """Return how many of the most likely tokens the full sampler finds for the rows of some steps."""
    return top_size(max(step.num_top for step in steps))

"""Turns scheduled steps into device calls, ahead of the host by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.execution import fixed_rows
from jpaged.execution.batch import BatchBuilder, StepBatch, empty_batch
from jpaged.execution.buckets import Buckets
from jpaged.execution.pool import PoolSpec
from jpaged.execution.prompt_scores import PromptScores, score_rows, slices
from jpaged.execution.sample_step import StepOutput
from jpaged.execution.sampling_batch import RANKED, all_plain, greedy_rows, sampling_arrays, top_size
from jpaged.execution.worker import Worker
from jpaged.scheduling.step import ScheduledStep, TopTokens


@dataclass(frozen=True)
class InFlight:
    """A dispatched step whose results may not exist yet.

    Attributes:
        fetch: see `Worker`.
        scores: of prompt tokens, where a request asked for them.
    """

    step: ScheduledStep
    output: StepOutput
    fetch: Callable[[Any], Any]
    scores: PromptScores | None = None

    def wait(self) -> tuple[list[int], list[float], TopTokens | None]:
        """Sampled (tokens, logprobs, most likely tokens where a request asked for them), one a scheduled sample;
        blocks until the device is done."""
        count = len(self.step.samples)
        if not self.step.num_top:
            tokens, logprobs = self.fetch((self.output.tokens, self.output.logprobs))
            return tokens[:count].tolist(), logprobs[:count].tolist(), None
        tokens, logprobs, *top = (x[:count] for x in self.fetch(self.output))
        return tokens.tolist(), logprobs.tolist(), TopTokens(*top)


class Runner:
    """Gives a worker the arrays of each step, padded to buckets that are known beforehand.

    Args:
        can_swap: blocks may be swapped to the host: `warmup` compiles for it.
        deterministic: steps run as `fixed_rows` says.

    Attributes:
        worker: owns the device state.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        spec: PoolSpec,
        mesh: Mesh,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        can_swap: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.spec = spec
        self.mesh = mesh
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.buckets = Buckets(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            only=fixed_rows.BUCKET if deterministic else None,
        )
        self.worker = Worker(graphdef, params, spec, mesh, max_num_seqs=max_num_seqs, deterministic=deterministic)
        self._deterministic = deterministic
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._builder = BatchBuilder(spec.layout, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self._can_swap = can_swap

    @property
    def copy_sizes(self) -> tuple[int, ...]:
        """Padded numbers of block copies in one launch."""
        return tuple(dict.fromkeys([min(16, self.max_num_seqs), self.max_num_seqs]))

    def dispatch(self, step: ScheduledStep) -> InFlight | None:
        """Start a step; returns at once (JAX dispatches asynchronously), None when there is nothing to compute."""
        if step.dropped or step.swap_out or step.swap_in:
            self.worker.swap(step.dropped, step.swap_out, step.swap_in)
        if step.copies:
            self._copy_blocks(step)
        if not step.chunks:
            return None
        if self._deterministic:
            bucket = fixed_rows.padded_bucket(step.num_tokens, self.max_num_seqs)
        else:
            bucket = self.buckets.smallest(tokens=step.num_tokens, seqs=len(step.chunks))
        batch = self._builder.build(step, bucket)
        self.worker.compute(batch, bucket, len(step.samples))
        scores = self._score_prompts(step, batch) if step.scored else None
        return InFlight(step, self._draw(step), self.worker.fetch, scores)

    def _score_prompts(self, step: ScheduledStep, batch: StepBatch) -> PromptScores:
        top = top_size(max(request.params.prompt_logprobs or 0 for request, _ in step.scored))
        rows = score_rows(step, np.asarray(batch.query_starts))
        outputs = [self.worker.score(part, targets, top) for part, targets in slices(rows)]
        return PromptScores(rows.scores, outputs, self.worker.fetch)

    def _draw(self, step: ScheduledStep) -> StepOutput:
        args = sampling_arrays(step.samples, self.buckets.smallest_sample(len(step.samples)), self._vocab_size)
        # The plain variant may add up in another order.
        plain = all_plain(args) and not self._deterministic
        return self.worker.draw(args, 0 if plain else top_size(step.num_top))

    def _copy_blocks(self, step: ScheduledStep) -> None:
        per_group = [[copy for copy in step.copies if copy.group == group] for group in range(len(self.spec.views))]
        most = max(len(copies) for copies in per_group)
        size = next((s for s in self.copy_sizes if s >= most), 1 << (most - 1).bit_length())
        pairs = np.full((2, len(per_group), size), -1, np.int32)
        for group, copies in enumerate(per_group):
            for i, copy in enumerate(copies):
                limit = self.spec.views[group][0]
                if not (0 <= copy.src < limit and 0 <= copy.dst < limit):
                    raise RuntimeError(f"block copy {copy} is outside [0, {limit})")
                pairs[:, group, i] = copy.src, copy.dst
        self.worker.copy_blocks(pairs[0], pairs[1])

    # ------------------------------------------------------------------ warm-up

    def warmup(self) -> Iterator[str]:
        """Compile every shape, one an iteration; yields what was just compiled. Nothing is run.

        Shapes are traced here and compiled in threads, as the compiler leaves Python free to go on.
        """
        self.worker.announce("warmup", ())
        with ThreadPoolExecutor(2) as threads:
            pending = deque[tuple[str, Future[None]]]()
            for name, compile_it in self._shapes():
                pending.append((name, threads.submit(compile_it)))
                while len(pending) > 4 or (pending and pending[0][1].done()):
                    yield _finished(*pending.popleft())
            while pending:
                yield _finished(*pending.popleft())
        jax.block_until_ready(self.worker.pool)
        self.worker.warm = True

    def _shapes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What `warmup` compiles: names and the compilations of traced programs."""
        for size in self.copy_sizes:
            ids = np.full((len(self.spec.views), size), -1, np.int32)
            yield f"block copy x{size}", self.worker.prepare_copy(ids, ids)
        if self._can_swap:
            yield from self.worker.prepare_swaps()
        for bucket in self.buckets.all:
            kind = "decode" if bucket.decode_only else "mixed"
            batch = empty_batch(
                bucket, self.spec.layout, max_num_seqs=self.max_num_seqs, max_model_len=self._max_model_len
            )
            yield f"{kind} step, {bucket.tokens} tokens", self.worker.prepare_compute(batch, bucket)
        for rows in self.buckets.sample_rows:
            for top, kind in self._samplers:
                args = greedy_rows(rows, self._vocab_size)
                yield f"{kind} sampler, {rows} rows", self.worker.prepare_draw(args, top)

    @property
    def _samplers(self) -> tuple[tuple[int, str], ...]:
        return ((RANKED, "full"),) if self._deterministic else ((0, "greedy"), (RANKED, "full"))

    @property
    def num_warmup(self) -> int:
        """How many shapes `warmup` compiles."""
        swaps = self.worker.host.num_shapes if self._can_swap else 0
        return (
            len(self.copy_sizes) + swaps + len(self.buckets.all) + len(self._samplers) * len(self.buckets.sample_rows)
        )


def _finished(name: str, compiling: Future[None]) -> str:
    compiling.result()
    return name

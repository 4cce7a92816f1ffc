"""Runs scheduled steps on the devices, ahead of the host by one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.execution import fixed_rows
from jpaged.execution.batch import BatchBuilder, StepBatch, empty_batch
from jpaged.execution.buckets import Bucket, Buckets
from jpaged.execution.logit_edits import LogitEdits
from jpaged.execution.mesh import sharding
from jpaged.execution.params import check_like
from jpaged.execution.pool import PoolSpec, make_pool
from jpaged.execution.program import Program
from jpaged.execution.prompt_scores import PromptScores, make_score, score_rows, slices
from jpaged.execution.sample_step import StepOutput, make_sample_step
from jpaged.execution.sampler import SamplingArrays
from jpaged.execution.sampling_batch import RANKED, all_plain, greedy_rows, sampling_arrays, top_size
from jpaged.execution.step import make_block_copy, make_step
from jpaged.execution.swap import HostStore
from jpaged.model_api import TENSOR_AXIS
from jpaged.scheduling.step import ScheduledStep, TopTokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InFlight:
    """A dispatched step whose results may not exist yet.

    Attributes:
        scores: of prompt tokens, where a request asked for them.
    """

    step: ScheduledStep
    output: StepOutput
    scores: PromptScores | None = None

    def wait(self) -> tuple[list[int], list[float], TopTokens | None]:
        """Sampled (tokens, logprobs, most likely tokens where a request asked for them), one a scheduled sample;
        blocks until the device is done."""
        count = len(self.step.samples)
        if not self.step.num_top:
            tokens, logprobs = jax.device_get((self.output.tokens, self.output.logprobs))
            return tokens[:count].tolist(), logprobs[:count].tolist(), None
        tokens, logprobs, *top = (x[:count] for x in jax.device_get(self.output))
        return tokens.tolist(), logprobs.tolist(), TopTokens(*top)


class Runner:
    """Owns the device state: the weights, the pool (donated to every step) and the last step's tokens.

    Args:
        can_swap: blocks may be swapped to the host: `warmup` compiles for it.
        deterministic: steps run as `fixed_rows` says.

    Attributes:
        num_recompiles: shapes compiled after `warmup`; each was logged.
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
        self.params = params
        self.spec = spec
        self.mesh = mesh
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.buckets = Buckets(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            only=fixed_rows.BUCKET if deterministic else None,
        )
        self._deterministic = deterministic
        self.num_recompiles = 0
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._builder = BatchBuilder(spec.layout, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self._compiled: set[Hashable] = set()
        self._warm = False
        self._step = Program(make_step(graphdef, spec, mesh), self._count)
        self._sample = Program(make_sample_step(graphdef, mesh), self._count)
        self._score = Program(make_score(graphdef, mesh), self._count)
        self._copy = Program(make_block_copy(spec, mesh), self._count)
        self._can_swap = can_swap
        self._host = HostStore(spec, mesh, self._count)
        # A CPU takes a second to map a gigabyte of pool, and warming up does not need it.
        thread = ThreadPoolExecutor(1)
        self._pool_made = thread.submit(make_pool, spec, mesh)
        thread.shutdown(wait=False)
        self._pool_array: jax.Array | None = None
        self._open_masks: dict[int, jax.Array] = {}
        self._last_tokens = jax.device_put(jnp.zeros(max_num_seqs, jnp.int32), sharding(mesh))

    @property
    def _pool(self) -> jax.Array:
        if self._pool_array is None:
            self._pool_array = self._pool_made.result()
        return self._pool_array

    @_pool.setter
    def _pool(self, pool: jax.Array) -> None:
        self._pool_array = pool

    @property
    def num_compiled(self) -> int:
        """Shapes of step, sampler, block copy and swap compiled so far."""
        return len(self._compiled)

    @property
    def copy_sizes(self) -> tuple[int, ...]:
        """Padded numbers of block copies in one launch."""
        return tuple(dict.fromkeys([min(16, self.max_num_seqs), self.max_num_seqs]))

    def dispatch(self, step: ScheduledStep) -> InFlight | None:
        """Start a step; returns at once (JAX dispatches asynchronously), None when there is nothing to compute."""
        self._host.forget(step.dropped)
        self._host.swap_out(self._pool, step.swap_out)
        self._pool = self._host.swap_in(self._pool, step.swap_in)
        if step.copies:
            self._dispatch_copies(step)
        if not step.chunks:
            return None
        run = self._run_fixed if self._deterministic else self._run_ragged
        batch, sampled, hidden = run(step)
        scores = self._score_prompts(step, batch, hidden) if step.scored else None
        rows = self.buckets.smallest_sample(len(step.samples))
        args = sampling_arrays(step.samples, rows, self._vocab_size)
        return InFlight(step, self._draw(sampled, args, step.num_top), scores)

    def _run_ragged(self, step: ScheduledStep) -> tuple[StepBatch, jax.Array, jax.Array]:
        """The step's arrays, hidden states of its sampled rows, and of all its tokens."""
        bucket = self.buckets.smallest(tokens=step.num_tokens, seqs=len(step.chunks))
        batch = self._builder.build(step, bucket)
        return batch, *self._run(batch, bucket)

    def _run_fixed(self, step: ScheduledStep) -> tuple[StepBatch, jax.Array, jax.Array]:
        batch = self._builder.build(step, fixed_rows.padded_bucket(step.num_tokens, self.max_num_seqs))
        parts, sampled = [], None
        for launch, here in fixed_rows.launches(batch, len(step.samples)):
            rows, hidden = self._run(launch, fixed_rows.BUCKET)
            sampled = rows if sampled is None else jnp.where(here[:, None], rows, sampled)
            parts.append(hidden)
        assert sampled is not None, "a step that is dispatched has tokens"
        return batch, sampled, jnp.concatenate(parts) if step.scored else hidden

    def _run(self, batch: StepBatch, bucket: Bucket) -> tuple[jax.Array, jax.Array]:
        self._pool, sampled, hidden = self._step(
            ("step", bucket), self.params, self._pool, batch, self._last_tokens, decode_only=bucket.decode_only
        )
        return sampled, hidden

    def _score_prompts(self, step: ScheduledStep, batch: StepBatch, hidden: jax.Array) -> PromptScores:
        top = top_size(max(request.params.prompt_logprobs or 0 for request, _ in step.scored))
        rows = score_rows(step, np.asarray(batch.query_starts))
        outputs = []
        for part, targets in slices(rows):
            key = ("score", hidden.shape[0], top)
            outputs.append(self._score(key, self.params, hidden, part, targets, top=top))
        return PromptScores(rows.scores, outputs)

    def _draw(self, hidden: jax.Array, args: SamplingArrays, num_top: int = 0) -> StepOutput:
        # The plain variant may add up in another order.
        top = 0 if all_plain(args) and not self._deterministic else top_size(num_top)
        args = self._placed(args)
        output = self._sample(_sample_key(args, top), self.params, hidden, args, self._last_tokens, top=top)
        self._last_tokens = output.tokens
        return output

    def _placed(self, args: SamplingArrays) -> SamplingArrays:
        return args._replace(edits=args.edits._replace(mask=self._mask(args.edits)))

    def _mask(self, edits: LogitEdits) -> jax.Array:
        """The step's token masks on the device; where no row has one, an array that is there already."""
        if edits.masked.any():
            return jax.device_put(edits.mask, sharding(self.mesh))
        rows = len(edits.masked)
        if rows not in self._open_masks:
            self._open_masks[rows] = jax.device_put(edits.mask, sharding(self.mesh))
        return self._open_masks[rows]

    def _dispatch_copies(self, step: ScheduledStep) -> None:
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
        self._pool = self._copy(("copy", size), self._pool, pairs[0], pairs[1])

    def _count(self, shape: Hashable) -> None:
        self._compiled.add(shape)
        if self._warm:
            self.num_recompiles += 1
            logger.warning("compiling %s after warm-up (number %d)", shape, self.num_recompiles)

    # ------------------------------------------------------------------ warm-up

    def warmup(self) -> Iterator[str]:
        """Compile every shape, one an iteration; yields what was just compiled. Nothing is run.

        Shapes are traced here and compiled in threads, as the compiler leaves Python free to go on.
        """
        with ThreadPoolExecutor(2) as threads:
            pending = deque[tuple[str, Future[None]]]()
            for name, compile_it in self._shapes():
                pending.append((name, threads.submit(compile_it)))
                while len(pending) > 4 or (pending and pending[0][1].done()):
                    yield _finished(*pending.popleft())
            while pending:
                yield _finished(*pending.popleft())
        jax.block_until_ready(self._pool)
        self._warm = True

    def _shapes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What `warmup` compiles: names and the compilations of traced programs."""
        pool = jax.ShapeDtypeStruct(self.spec.shape, self.spec.dtype, sharding=sharding(self.mesh, TENSOR_AXIS))
        for size in self.copy_sizes:
            ids = np.full((len(self.spec.views), size), -1, np.int32)
            yield f"block copy x{size}", self._copy.prepare(("copy", size), pool, ids, ids)
        if self._can_swap:
            yield from self._host.shapes(pool)
        for bucket in self.buckets.all:
            kind = "decode" if bucket.decode_only else "mixed"
            batch = empty_batch(
                bucket, self.spec.layout, max_num_seqs=self.max_num_seqs, max_model_len=self._max_model_len
            )
            yield (
                f"{kind} step, {bucket.tokens} tokens",
                self._step.prepare(
                    ("step", bucket), self.params, pool, batch, self._last_tokens, decode_only=bucket.decode_only
                ),
            )
        _, hidden, _ = self._step.out_info
        hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=sharding(self.mesh))
        for rows in self.buckets.sample_rows:
            for top, kind in self._samplers:
                args = self._placed(greedy_rows(rows, self._vocab_size))
                yield (
                    f"{kind} sampler, {rows} rows",
                    self._sample.prepare(_sample_key(args, top), self.params, hidden, args, self._last_tokens, top=top),
                )

    @property
    def _samplers(self) -> tuple[tuple[int, str], ...]:
        return ((RANKED, "full"),) if self._deterministic else ((0, "greedy"), (RANKED, "full"))

    @property
    def num_warmup(self) -> int:
        """How many shapes `warmup` compiles."""
        swaps = self._host.num_shapes if self._can_swap else 0
        return (
            len(self.copy_sizes) + swaps + len(self.buckets.all) + len(self._samplers) * len(self.buckets.sample_rows)
        )

    # ------------------------------------------------------------------ weights

    def update_params(self, new: Any) -> None:
        """Swap the weights for others of the same structure, shapes and dtypes, placed where the old ones are.

        Raises:
            ValueError: naming the first leaf that differs; the old weights stay.
        """
        check_like(new, self.params)
        self.params = jax.device_put(new, jax.tree.map(lambda leaf: leaf.sharding, self.params))


def _sample_key(args: SamplingArrays, top: int) -> Hashable:
    return "sample", len(args.temperature), len(args.edits.token_row), len(args.edits.ban_row), top


def _finished(name: str, compiling: Future[None]) -> str:
    compiling.result()
    return name

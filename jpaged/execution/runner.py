"""Turns scheduled steps into device calls, ahead of the host by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.execution.batch import BatchBuilder, StepBatch, copy_pairs, empty_batch, without_adapters
from jpaged.execution.buckets import Bucket, Buckets
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.deterministic import BUCKET, empty_launch, image_bucket, padded_bucket
from jpaged.execution.drafts import Drafter, DraftProgram
from jpaged.execution.encode import sees_images_on
from jpaged.execution.encoder_calls import EncoderCalls
from jpaged.execution.in_flight import Draw, InFlight
from jpaged.execution.pooling import PooledStates, owners_of_rows
from jpaged.execution.program_store import ProgramStore
from jpaged.execution.replicas import num_replicas, stack
from jpaged.execution.sampling.prompt_scores import PromptScores, score_rows, slices
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.sampling.sampling_batch import (
    RANKED,
    all_plain,
    greedy_rows,
    of_one_shape,
    sampling_arrays,
    top_size,
)
from jpaged.execution.worker import Worker
from jpaged.memory.policies import Adapters
from jpaged.scheduling.step import AdapterLoad, ScheduledStep

T = TypeVar("T")
_SAMPLERS = ((0, "greedy"), (RANKED, "full"))
"""Variants of the sampler: how many of the most likely tokens each can give back, and its name."""


class Runner:
    """Gives a worker the arrays of each step, padded to buckets that are known beforehand.

    On a data-parallel mesh each iteration has a step of every replica, and one bucket that holds them all.

    Args:
        can_swap: whether blocks may be swapped to the host: `warmup` then compiles for it.
        deterministic: whether steps run as `jpaged.execution.deterministic` says.
        verifies: whether steps verify drafts, see `Buckets`.
        draft: what makes drafts on the device; None = nothing does.
        images: whether steps may have tokens that stand for images, see `Buckets`.
        together: tokens of an image that see each other; None = they do not.
        adapters: whether sequences may run with low-rank adapters, see `Buckets`.
        examples: images to compile the encoder for, see `jpaged.model_api.SeesImages`.
        programs: where the model's programs are loaded from, or collected for; None = neither.

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
        verifies: bool = False,
        draft: DraftProgram | None = None,
        images: bool = False,
        together: int | None = None,
        adapters: bool = False,
        examples: Iterable[tuple[Mapping[str, np.ndarray], int]] = (),
        programs: ProgramStore | None = None,
    ) -> None:
        self.spec = spec
        self.mesh = mesh
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.buckets = Buckets(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            verifies=verifies,
            images=images,
            decodes_with_images=images and sees_images_on(spec),
            adapters=adapters,
            only=replace(BUCKET, images=images) if deterministic else None,
            together=image_bucket(together) if images and together else None,
        )
        self._sees_images = images
        self.worker = Worker(
            graphdef,
            params,
            spec,
            mesh,
            max_num_seqs=max_num_seqs,
            deterministic=deterministic,
            draft=draft,
            programs=programs,
        )
        self._images = EncoderCalls(self.worker, tuple(examples), budget=max_num_batched_tokens, alone=deterministic)
        self._deterministic = deterministic
        self._adapters = adapters
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self.num_replicas = num_replicas(mesh)
        self._builders = [
            BatchBuilder(spec, max_num_seqs=max_num_seqs, max_model_len=max_model_len) for _ in range(self.num_replicas)
        ]
        self._can_swap = can_swap
        self._drafter = Drafter(
            self._builders[0].build,
            lambda seqs: self.buckets.smallest(tokens=seqs, seqs=seqs),
            self.buckets.smallest_sample,
            vocab_size,
            self.buckets.decode[-1].seqs,
            self._draft,
        )
        if deterministic:
            self._empty_batch(self.buckets.decode[0])  # refuses layers that cannot be computed so

    @property
    def copy_sizes(self) -> tuple[int, ...]:
        """Return the padded numbers of block copies that a launch can have."""
        return tuple(dict.fromkeys([min(16, self.max_num_seqs), self.max_num_seqs]))

    def dispatch(self, step: ScheduledStep) -> InFlight | None:
        """Start a step; returns at once (JAX dispatches asynchronously), None when there is nothing to compute."""
        (in_flight,) = self.dispatch_all([step])
        return in_flight

    def dispatch_all(self, steps: Sequence[ScheduledStep]) -> list[InFlight | None]:
        """Start one step of each replica; see `dispatch`."""
        first = steps[0]
        if first.dropped or first.swap_out or first.swap_in:  # replicas do not swap
            self.worker.swap(first.dropped, first.swap_out, first.swap_in)
        if any(step.copies for step in steps):
            self._copy_blocks(*steps)
        if any(step.encodes for step in steps):
            self._images.encode([step.encodes for step in steps])
        for load in first.loads:  # replicas take no adapters
            self._load(load)
        if not any(step.chunks for step in steps):
            return [None] * len(steps)
        if first.undrafted:  # replicas have no drafts
            first = self._drafter.fill(first)
            steps = [first]
        if self._deterministic:
            bucket = padded_bucket(first.num_tokens, self.max_num_seqs, images=self._sees_images)
            bucket = replace(bucket, adapters=self._adapters)
        else:
            sizes = [(step.num_tokens, len(step.chunks)) for step in steps]
            reads = any(step.reads for step in steps)
            bucket = self.buckets.common(sizes, images=reads, adapters=bool(first.adapted))
        batches = [builder.build(step, bucket) for builder, step in zip(self._builders, steps, strict=True)]
        self.worker.compute(stack(self.mesh, batches), bucket, len(first.samples))
        scores = self._score_prompts(first, batches[0]) if first.scored else None  # nor do they score prompts
        pooled = self._pool_prompts(first, batches[0]) if first.pooled else None  # nor do they embed them
        draw = self._draw(steps)
        if len(steps) == 1:
            return [InFlight(first, draw, scores=scores, pooled=pooled)]
        return [InFlight(step, draw, replica) if step.chunks else None for replica, step in enumerate(steps)]

    def _load(self, load: AdapterLoad) -> None:
        blocks, held = load.stored.blocks, load.adapter.blocks
        padding = self.spec.layout.groups[self._adapter_group].block_bytes - held.shape[2]
        self.worker.load_blocks(self._adapter_group, blocks, np.pad(held, ((0, 0), (0, 0), (0, padding))))

    @cached_property
    def _adapter_group(self) -> int:
        return next(g for g, plan in enumerate(self.spec.layout.groups) if isinstance(plan.spec.policy, Adapters))

    def give_back(self, pages: Sequence[Iterable[int]]) -> None:
        """Return the memory of large pages, some of each replica, to the system, where the device shares the host's."""
        if not self.worker.frees_memory:
            return
        unused = np.zeros((self.num_replicas, self.spec.layout.num_pages), bool)
        for mine, of_replica in zip(unused, pages, strict=True):
            mine[list(of_replica)] = True
        if unused.any():
            self.worker.give_back(unused)

    def _score_prompts(self, step: ScheduledStep, batch: StepBatch) -> PromptScores:
        top = top_size(max(request.params.prompt_logprobs or 0 for request, _ in step.scored))
        rows = score_rows(step, np.asarray(batch.query_starts))
        outputs = [self.worker.score(part, targets, top) for part, targets in slices(rows)]
        return PromptScores(rows.scores, outputs, self.worker.fetch)

    def _pool_prompts(self, step: ScheduledStep, batch: StepBatch) -> PooledStates:
        most = self.max_num_seqs
        owners = owners_of_rows(step, np.asarray(batch.query_starts), most, len(batch.tokens))
        return PooledStates(step.pooled, self.worker.pool_hidden(owners, most), self.worker.fetch)

    def _draw(self, steps: Sequence[ScheduledStep]) -> Draw:
        rows = self.buckets.smallest_sample(max(len(step.samples) for step in steps))
        each = [sampling_arrays(step.samples, rows, self._vocab_size) for step in steps]
        # The plain variant may add up in another order.
        plain = all(map(all_plain, each)) and not self._deterministic
        num_top = max(step.num_top for step in steps)
        output = self.worker.draw(stack(self.mesh, of_one_shape(each)), 0 if plain else top_size(num_top))
        return Draw(output, self.worker.fetch, ranked=num_top > 0)

    def _draft(self, batch: StepBatch, bucket: Bucket, args: SamplingArrays, top: int) -> list[int]:
        return self.worker.fetch(self.worker.draft(batch, bucket, args, top)).tolist()

    def _copy_blocks(self, *steps: ScheduledStep) -> None:
        groups = range(len(self.spec.views))
        most = max(sum(copy.group == group for copy in step.copies) for step in steps for group in groups)
        size = next((s for s in self.copy_sizes if s >= most), 1 << (most - 1).bit_length())
        src, dst = stack(self.mesh, [copy_pairs(step.copies, self.spec, size) for step in steps])
        self.worker.copy_blocks(src, dst)

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
        self.worker.compilations.warm = True

    def _shapes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield what `warmup` compiles: each shape's name and its traced program's compilation."""
        for size in self.copy_sizes:
            ids = self._of_all(np.full((len(self.spec.views), size), -1, np.int32))
            yield f"block copy x{size}", self.worker.prepare_copy(ids, ids)
        if self._can_swap:
            yield from self.worker.prepare_swaps()
        for bucket in self.buckets.all:
            kind = ("decode" if bucket.decode_only else "mixed") + (" with images" if bucket.images else "")
            kind += " with adapters" if bucket.adapters else ""
            batch = self._of_all(self._empty_batch(bucket))
            yield f"{kind} step, {bucket.tokens} tokens", self.worker.prepare_compute(batch, bucket)
        yield from self._images.shapes()
        for rows in self.buckets.sample_rows:
            for top, kind in self._samplers:
                args = self._of_all(greedy_rows(rows, self._vocab_size))
                yield f"{kind} sampler, {rows} rows", self.worker.prepare_draw(args, top)
        if self.worker.drafter is not None:
            yield from self._draft_shapes()

    def _draft_shapes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for bucket in self._draft_buckets:
            batch = without_adapters(self._empty_batch(bucket))
            yield f"drafting step, {bucket.tokens} tokens", self.worker.prepare_draft(batch, bucket)
        for rows in self.buckets.sample_rows:
            for top, kind in _SAMPLERS:
                args = greedy_rows(rows, self._vocab_size)
                yield f"{kind} drafting sampler, {rows} rows", self.worker.prepare_draft_draw(args, top)

    @property
    def _draft_buckets(self) -> tuple[Bucket, ...]:
        followed = tuple(bucket for bucket in self.buckets.all if not bucket.adapters)
        return followed if self.worker.drafter_follows else self.buckets.decode

    def _empty_batch(self, bucket: Bucket) -> StepBatch:
        if self._deterministic:  # one program serves all steps
            bucket = replace(bucket, adapters=self._adapters)
        batch = empty_batch(bucket, self.spec, max_num_seqs=self.max_num_seqs, max_model_len=self._max_model_len)
        return empty_launch(batch, self.spec.caches) if self._deterministic and bucket.decode_only else batch

    def _of_all(self, of_one: T) -> T:
        return stack(self.mesh, [of_one] * self.num_replicas)

    @property
    def _samplers(self) -> tuple[tuple[int, str], ...]:
        return _SAMPLERS[1:] if self._deterministic else _SAMPLERS

    @property
    def num_warmup(self) -> int:
        """Return how many shapes `warmup` compiles."""
        swaps = self.worker.host.num_shapes if self._can_swap else 0
        rows, drafting = len(self.buckets.sample_rows), self._images.num_shapes
        if self.worker.drafter is not None:
            drafting += len(self._draft_buckets) + len(_SAMPLERS) * rows
        return len(self.copy_sizes) + swaps + len(self.buckets.all) + len(self._samplers) * rows + drafting


def _finished(name: str, compiling: Future[None]) -> str:
    compiling.result()
    return name

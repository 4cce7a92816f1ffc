"""Turns scheduled steps into device calls, each before the results of the step before are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.execution.batch import BatchBuilder, StepBatch
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.deterministic import padded_bucket
from jpaged.execution.drafts import Drafter, DraftProgram
from jpaged.execution.mesh import is_local, num_replicas
from jpaged.execution.packing import opened, stacked
from jpaged.execution.pooling import PromptPooling
from jpaged.execution.readouts.base import ForwardPass, InFlight, Reading, Readings, Readout
from jpaged.execution.readouts.draws import Draws
from jpaged.execution.readouts.prompt_scores import PromptScoring
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.shapes import SAMPLERS, Shapes, compiled_in_threads
from jpaged.execution.step_dump import StepMemory, StepRecorder
from jpaged.execution.step_settings import StepSettings
from jpaged.execution.transfer.tiers import BlockThread
from jpaged.execution.worker import Worker
from jpaged.memory import Adapters, ImageFeatures
from jpaged.scheduling.step import ScheduledStep


class Runner:
    """Gives a worker the arrays of each step, padded to buckets that are known beforehand.

    On a data-parallel mesh each iteration has a step of every replica, and one bucket that holds them all.

    Args:
        settings: what the steps may be like.
        can_swap: whether blocks may be swapped to the host: `warmup` then compiles for it.
        draft: what makes drafts on the device; None = nothing does.
        examples: images to compile the encoder for, see `jpaged.model_api.TakesImages`.
        programs: where the model's programs are loaded from, or collected for; None = neither.
        tiers: write blocks to each tier below the pool and read them.

    Attributes:
        worker: owns the device state.
        shapes: what can be compiled ahead.
        recorder: writes steps to files, see `record_steps`; None = nothing does.
        takes_larger: whether a step whose shape is not compiled runs in a larger one that is, rather than wait.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        spec: PoolSpec,
        mesh: Mesh,
        settings: StepSettings,
        *,
        can_swap: bool = False,
        draft: DraftProgram | None = None,
        examples: Iterable[tuple[Mapping[str, np.ndarray], int]] = (),
        programs: ProgramStore | None = None,
        tiers: Sequence[BlockThread] = (),
    ) -> None:
        self.spec = spec
        self.mesh = mesh
        self.settings = settings
        self.buckets = settings.buckets(spec)
        self.worker = Worker(
            graphdef,
            params,
            spec,
            mesh,
            settings=settings,
            can_swap=can_swap,
            draft=draft,
            examples=tuple(examples),
            programs=programs,
            tiers=tiers,
        )
        self.num_replicas = num_replicas(mesh)
        self._builders = [
            BatchBuilder(spec, max_num_seqs=settings.max_num_seqs, max_model_len=settings.max_model_len)
            for _ in range(self.num_replicas)
        ]
        self._common_bucket = lru_cache(maxsize=256)(self.buckets.common)
        self.takes_larger = False
        self.recorder: StepRecorder | None = None
        self.shapes = Shapes(
            model=self.worker.model,
            drafter=self.worker.models.drafter,
            drafter_follows=self.worker.models.drafter_follows,
            drafter_reads_hidden=self.worker.models.drafter_reads_hidden,
            drafts_blocks=draft is not None and draft.block is not None,
            works=tuple(self.worker.works.values()),
            buckets=self.buckets,
            spec=spec,
            mesh=mesh,
            settings=settings,
            tables=self.worker.tables,
        )
        # A draw is the last of a pass: it lets go of the hidden states.
        self._readouts: list[Readout] = [
            PromptScoring(mesh),
            PromptPooling(mesh, settings.max_num_seqs),
            Draws(
                mesh,
                self.buckets,
                settings.vocab_size,
                deterministic=settings.deterministic,
                is_ready=lambda args, top: not self.takes_larger or self.worker.model.has_sample(args, top),
                lacks=self._lacks_draw,
            ),
        ]
        self._drafter = Drafter(
            self._builders[0].build,
            self.shapes.draft_bucket,
            self.buckets.samples_holding,
            settings.vocab_size,
            self.buckets.decode[-1].seqs,
            self._draft,
            block=None if draft is None else draft.block,
        )
        if settings.deterministic:
            self.shapes.empty_batch(self.buckets.decode[0])  # refuses layers that cannot be computed so

    def dispatch(self, step: ScheduledStep) -> InFlight | None:
        """Start a step; returns at once (JAX dispatches asynchronously), None when there is nothing to compute."""
        (in_flight,) = self.dispatch_all([step])
        return in_flight

    def dispatch_all(self, steps: Sequence[ScheduledStep]) -> list[InFlight | None]:
        """Start one step of each replica, in three calls; see `dispatch`.

        Where a draw waits for tokens of the step before (`ScheduledStep.draws_late`), the third call is left to the
        caller, who makes it by `Readings.start` once the host has those tokens.
        """
        self.work_on_pool(steps)
        forward = self.forward(steps)
        if forward is None:
            return [None] * len(steps)
        readings = Readings(partial(self.read, forward))
        if not any(step.draws_late for step in steps):
            readings.start()
        return [InFlight(step, readings, r) if step.num_chunks else None for r, step in enumerate(forward.steps)]

    def work_on_pool(self, steps: Sequence[ScheduledStep]) -> None:
        """Start what changes the pool before the steps' tokens are computed."""
        kinds = {kind for step in steps for kind in step.work}
        if not kinds:
            return
        works = self.worker.works
        if unknown := kinds - works.keys():
            raise ValueError(f"a step has work of kind {min(unknown)!r}; known: {', '.join(works)}")
        for kind, work in works.items():  # in the order of their phases
            if kind in kinds:
                for args in work.calls([step.work_of(kind) for step in steps]):
                    self.worker.work(kind, *args)

    def forward(self, steps: Sequence[ScheduledStep]) -> ForwardPass | None:
        """Start the model over the steps' tokens; None when there are none."""
        if not any(step.num_chunks for step in steps):
            return None
        if steps[0].undrafted:  # replicas have no drafts
            steps = [self._drafter.fill(steps[0])]
        bucket = self._bucket_of(steps)
        batches = [builder.laid_out(step, bucket) for builder, step in zip(self._builders, steps, strict=True)]
        recording = None
        if self.recorder is not None:  # replicas have none
            recording = self.recorder.record(self._memory_of(steps[0]), steps[0], opened(batches[0]), bucket)
        self.worker.compute(stacked(self.mesh, batches), bucket, steps[0].num_samples)
        return ForwardPass(steps, batches, recording)

    def read(self, forward: ForwardPass) -> list[Reading]:
        """Start what computes the results of a forward pass; nothing may have been computed since."""
        readings = (readout.start(self.worker, forward) for readout in self._readouts)
        return [reading for reading in readings if reading is not None]

    def _bucket_of(self, steps: Sequence[ScheduledStep]) -> Bucket:
        """Return the bucket that a step of each replica runs in."""
        if self.settings.deterministic:
            (step,) = steps
            bucket = padded_bucket(step.num_tokens, self.settings.max_num_seqs, images=self.settings.images)
            return replace(bucket, adapters=self.settings.adapters)
        sizes = tuple((step.num_tokens, step.num_chunks) for step in steps)
        rows = [step.rows for step in steps if step.rows]
        reads, adapted = (any(of.get(kind) for of in rows) for kind in (ImageFeatures.kind, Adapters.kind))
        bucket = self._common_bucket(sizes, images=reads, adapters=adapted)
        model = self.worker.model
        if not self.takes_larger or model.has_step(bucket):
            return bucket
        for larger in self.buckets.holding(bucket):
            if model.has_step(larger):
                self.worker.compilations.lacked(bucket.name)
                return larger
        return bucket

    def _lacks_draw(self, args: SamplingArrays, top: int) -> None:
        """Note that a draw by these arguments is made by a larger sampler; one that ranks more tokens than those of
        `SAMPLERS` is not compiled in the background."""
        for kind in SAMPLERS:
            if (kind.top, kind.tabled) == (top, args.tabled):
                self.worker.compilations.lacked(kind.of(args.position.shape[-1]))

    def _memory_of(self, step: ScheduledStep) -> StepMemory:
        """Return what a recorder reads of the device before a step."""
        worker, blocks = self.worker, self._builders[0].blocks_of(step)
        return StepMemory(
            worker.spec,
            worker.model.num_updates,
            blocks,
            contents=lambda: worker.blocks.read(worker.pool, [blocks]).arrays()[0],
            last_tokens=lambda: np.asarray(worker.last_tokens),
        )

    def record_steps(self, recorder: StepRecorder) -> None:
        """Write steps to files from now on.

        Raises:
            ValueError: there are several replicas, or processes.
        """
        if self.num_replicas > 1 or not is_local(self.mesh):
            raise ValueError(
                f"steps are written to files by engines of one process with data_parallel_size=1, not of "
                f"{jax.process_count()} process(es) with data_parallel_size={self.num_replicas}"
            )
        self.recorder = recorder

    def give_back(self, pages: Sequence[Iterable[int]]) -> None:
        """Return the memory of large pages, some of each replica, to the system, where the device shares the host's."""
        if not self.worker.frees_memory:
            return
        unused = np.zeros((self.num_replicas, self.spec.layout.num_pages), bool)
        for mine, of_replica in zip(unused, pages, strict=True):
            mine[list(of_replica)] = True
        if unused.any():
            self.worker.give_back(unused)

    def _draft(self, batch: StepBatch, bucket: Bucket, args: SamplingArrays, top: int) -> list[int]:
        return self.worker.fetch(self.worker.draft(batch, bucket, args, top)).tolist()

    # ------------------------------------------------------------------ warm-up

    def warmup(self) -> Iterator[str]:
        """Compile every shape, one an iteration, and yield its name. Nothing is run.

        Shapes are traced here and compiled in threads, as the compiler leaves Python free to go on.
        """
        self.worker.announce("warmup", ())
        yield from compiled_in_threads(self.shapes.all())
        jax.block_until_ready(self.worker.pool)
        self.worker.compilations.warm = True

    @property
    def num_warmup(self) -> int:
        """Return how many shapes `warmup` compiles."""
        return len(self.shapes)

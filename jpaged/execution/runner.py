"""Turns scheduled steps into device calls, each before the results of the step before are read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.execution.batch import BatchBuilder, StepBatch, copy_pairs
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.deterministic import padded_bucket
from jpaged.execution.drafts import Drafter, DraftProgram
from jpaged.execution.encode import Prepared, calls, feature_rows
from jpaged.execution.mesh import is_local, num_replicas, stack
from jpaged.execution.pooling import PromptPooling
from jpaged.execution.readouts.base import ForwardPass, InFlight, Readout
from jpaged.execution.readouts.draws import Draws
from jpaged.execution.readouts.prompt_scores import PromptScoring
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.shapes import SAMPLERS, Shapes, StepSettings, compiled_in_threads, sampler_name
from jpaged.execution.step_dump import StepMemory, StepRecorder
from jpaged.execution.transfer.disk import BlockThread
from jpaged.execution.worker import Worker
from jpaged.memory import Adapters, BlockCopy, ImageFeatures
from jpaged.scheduling.step import AdapterLoad, Encode, ScheduledStep
from jpaged.scheduling.work import COPIES, DROPPED, ENCODES, FROM_DISK, LOADS, SWAP_IN, SWAP_OUT, TO_DISK


class EncoderCalls:
    """Gives a worker the images of each step.

    Args:
        numbers: tells how many images whose features take these rows of the pool a call may have, most first.
    """

    def __init__(self, worker: Worker, numbers: Callable[[np.ndarray], tuple[int, ...]]) -> None:
        self._worker = worker
        self._numbers = numbers

    def encode(self, each: Sequence[Sequence[Encode]]) -> None:
        """Encode the images of each replica, those of one shape together."""
        spec, mesh = self._worker.spec, self._worker.mesh
        by_shape: dict[Hashable, list[list[Prepared]]] = {}
        for replica, encodes in enumerate(each):
            for encode in encodes:
                first = 0
                for image in encode.image.each:
                    rows = feature_rows(spec, encode.stored, first, image.features)
                    shape = len(rows), *sorted((name, array.shape) for name, array in image.arrays.items())
                    by_shape.setdefault(shape, [[] for _ in each])[replica].append((image.arrays, rows))
                    first += image.features
        for images in by_shape.values():
            example, image_rows = next(mine for mine in images if mine)[0]
            names = tuple(sorted(example))
            for call in calls(images, self._numbers(image_rows)):
                arrays, rows = stack(mesh, call)
                self._worker.encode(names, tuple(arrays[name] for name in names), rows)


class Runner:
    """Gives a worker the arrays of each step, padded to buckets that are known beforehand.

    On a data-parallel mesh each iteration has a step of every replica, and one bucket that holds them all.

    Args:
        settings: what the steps may be like.
        can_swap: whether blocks may be swapped to the host: `warmup` then compiles for it.
        draft: what makes drafts on the device; None = nothing does.
        examples: images to compile the encoder for, see `jpaged.model_api.TakesImages`.
        programs: where the model's programs are loaded from, or collected for; None = neither.
        disk: writes blocks to disk and reads them; None = nothing does.

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
        disk: BlockThread | None = None,
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
            max_num_seqs=settings.max_num_seqs,
            vocab_size=settings.vocab_size,
            deterministic=settings.deterministic,
            draft=draft,
            programs=programs,
            disk=disk,
            scored=settings.scores_draws,
        )
        self.num_replicas = num_replicas(mesh)
        self._builders = [
            BatchBuilder(spec, max_num_seqs=settings.max_num_seqs, max_model_len=settings.max_model_len)
            for _ in range(self.num_replicas)
        ]
        self.takes_larger = False
        self.recorder: StepRecorder | None = None
        self.shapes = Shapes(
            model=self.worker.model,
            drafter=self.worker.models.drafter,
            drafter_follows=self.worker.models.drafter_follows,
            drafter_reads_hidden=self.worker.models.drafter_reads_hidden,
            drafts_blocks=draft is not None and draft.block is not None,
            copy=self.worker.copy,
            host=self.worker.host if can_swap or disk is not None else None,
            buckets=self.buckets,
            spec=spec,
            mesh=mesh,
            settings=settings,
            load_adapters=self.worker.blocks.prepare_adapters if settings.adapters else None,
            adapters=self.worker.adapters if settings.adapters else None,
            examples=tuple(examples),
        )
        self._images = EncoderCalls(self.worker, self.shapes.numbers_together)
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
            self.buckets.smallest_sample,
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
        """Start one step of each replica, in three calls; see `dispatch`."""
        self.work_on_pool(steps)
        forward = self.forward(steps)
        return [None] * len(steps) if forward is None else self.read(forward)

    def work_on_pool(self, steps: Sequence[ScheduledStep]) -> None:
        """Start what changes the pool before the steps' tokens are computed."""
        first = steps[0]
        if writes := first.work_of(TO_DISK):  # replicas have no disk
            self.worker.write_to_disk(writes)
        swaps = [first.work_of(kind) for kind in (DROPPED, SWAP_OUT, SWAP_IN)]
        if any(swaps):  # replicas do not swap
            self.worker.swap(*swaps)
        if fills := first.work_of(FROM_DISK):
            self.worker.fill_from_disk(fills)
        if any(COPIES in step.work for step in steps):
            self._copy_blocks([step.work_of(COPIES) for step in steps])
        if any(ENCODES in step.work for step in steps):
            self._images.encode([step.work_of(ENCODES) for step in steps])
        for load in first.work_of(LOADS):  # replicas take no adapters
            self._load(load)

    def forward(self, steps: Sequence[ScheduledStep]) -> ForwardPass | None:
        """Start the model over the steps' tokens; None when there are none."""
        if not any(step.chunks for step in steps):
            return None
        if steps[0].undrafted:  # replicas have no drafts
            steps = [self._drafter.fill(steps[0])]
        bucket = self._bucket_of(steps)
        batches = [builder.build(step, bucket) for builder, step in zip(self._builders, steps, strict=True)]
        recording = None
        if self.recorder is not None:  # replicas have none
            recording = self.recorder.record(self._memory_of(steps[0]), steps[0], batches[0], bucket)
        self.worker.compute(stack(self.mesh, batches), bucket, len(steps[0].samples))
        return ForwardPass(steps, batches, recording)

    def read(self, forward: ForwardPass) -> list[InFlight | None]:
        """Start what computes the results of a forward pass; nothing may have been computed since."""
        readings = [readout.start(self.worker, forward) for readout in self._readouts]
        wanted = [reading for reading in readings if reading is not None]
        return [InFlight(step, wanted, r) if step.chunks else None for r, step in enumerate(forward.steps)]

    def _bucket_of(self, steps: Sequence[ScheduledStep]) -> Bucket:
        """Return the bucket that a step of each replica runs in."""
        if self.settings.deterministic:
            (step,) = steps
            bucket = padded_bucket(step.num_tokens, self.settings.max_num_seqs, images=self.settings.images)
            return replace(bucket, adapters=self.settings.adapters)
        sizes = [(step.num_tokens, len(step.chunks)) for step in steps]
        reads, adapted = (any(step.rows.get(kind) for step in steps) for kind in (ImageFeatures.kind, Adapters.kind))
        bucket = self.buckets.common(sizes, images=reads, adapters=adapted)
        model = self.worker.model
        if not self.takes_larger or model.has_step(bucket):
            return bucket
        for larger in self.buckets.holding(bucket):
            if model.has_step(larger):
                self.worker.compilations.lacked(bucket.name)
                return larger
        return bucket

    def _lacks_draw(self, rows: int, top: int) -> None:
        """Note that a draw of so many rows is made by a larger sampler; one that ranks more tokens than those of
        `SAMPLERS` is not compiled in the background."""
        if top in (kinds := dict(SAMPLERS)):
            self.worker.compilations.lacked(sampler_name(kinds[top], rows))

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

    def _load(self, load: AdapterLoad) -> None:
        blocks, held = load.stored.blocks, load.adapter.blocks
        group = self.worker.blocks.adapters
        assert group is not None, "an engine without adapters was given one"
        padding = self.spec.layout.groups[group].block_bytes - held.shape[2]
        self.worker.load_blocks(group, blocks, np.pad(held, ((0, 0), (0, 0), (0, padding))))

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

    def _copy_blocks(self, each: Sequence[Sequence[BlockCopy]]) -> None:
        groups = range(len(self.spec.views))
        most = max(sum(copy.group == group for copy in copies) for copies in each for group in groups)
        size = next((s for s in self.shapes.copy_sizes if s >= most), 1 << (most - 1).bit_length())
        src, dst = stack(self.mesh, [copy_pairs(copies, self.spec, size) for copies in each])
        self.worker.copy_blocks(src, dst)

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

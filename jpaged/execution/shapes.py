"""Lists the shapes of an engine's steps, whose number is known before anything runs, and traces them.

Tracing takes shapes only, and no array that a step changes: any thread may do it while the engine runs, and for devices
that this machine lacks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.execution.batch import StepBatch, empty_batch, without_adapters
from jpaged.execution.caches.pool import PoolSpec, abstract_pool
from jpaged.execution.compile.buckets import Bucket, Buckets
from jpaged.execution.compile.compiler_threads import NICENESS, set_niceness
from jpaged.execution.compile.program import Program
from jpaged.execution.deterministic import BUCKET, empty_launch, image_bucket, padded_bucket
from jpaged.execution.encode import calls, decodes_read_images, image_group, no_rows, numbers_together
from jpaged.execution.mesh import num_replicas, own_sharding, platform, stack
from jpaged.execution.programs import Compile, ModelPrograms
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.sampling.sampling_batch import RANKED, blank_rows
from jpaged.execution.transfer.adapter_matrices import AdapterMatrices, with_abstract_matrices
from jpaged.execution.transfer.host_store import HostStore


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Bounds the steps of one replica.

    Attributes:
        max_num_seqs, max_num_batched_tokens: most sequences and tokens of a step.
        max_model_len: most tokens of a sequence.
        vocab_size: number of tokens that are drawn from.
        deterministic: whether steps run as `jpaged.execution.deterministic` says.
        verifies: whether steps verify drafts, see `Buckets`.
        images: whether steps may have tokens that stand for images, see `Buckets`.
        together: tokens of an image that see each other; None = they do not.
        adapters: whether sequences may run with low-rank adapters, see `Buckets`.
        scored: whether every draw has a log-probability, even if no request needs it.
        draws: whether tokens are drawn; False for a model that generates nothing.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    deterministic: bool = False
    verifies: bool = False
    images: bool = False
    together: int | None = None
    adapters: bool = False
    scored: bool = True
    draws: bool = True

    @property
    def scores_draws(self) -> bool:
        """Tell whether every draw has log-probabilities, see `ModelPrograms`. The sampler of deterministic steps always
        computes them."""
        return self.scored or self.deterministic

    def buckets(self, spec: PoolSpec) -> Buckets:
        """Return the buckets of steps over a pool."""
        return Buckets(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            verifies=self.verifies,
            images=self.images,
            decodes_with_images=self.images and decodes_read_images(spec),
            adapters=self.adapters,
            only=replace(BUCKET, images=self.images) if self.deterministic else None,
            together=image_bucket(self.together) if self.images and self.together else None,
        )


T = TypeVar("T")
SAMPLERS = ((0, "greedy"), (RANKED, "full"))
"""Variants of the sampler: how many of the most likely tokens each can give back, and its name."""


def sampler_name(kind: str, rows: int) -> str:
    """Return what people call a variant of the sampler for a number of rows."""
    return f"{kind} sampler, {rows} rows"


@dataclass(frozen=True)
class Shape:
    """Holds a shape that steps may have.

    Attributes:
        name: what people call it; each shape of an engine has its own.
        trace: traces it; what that returns compiles it, in any thread.
        size: its tokens or rows; 0 = it has none, and no larger shape takes its place.
    """

    name: str
    trace: Callable[[], Compile]
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Lists the shapes of an engine's steps.

    Attributes:
        model: the programs of the model.
        drafter: those of what drafts; None = nothing does.
        drafter_follows: whether it computes whatever the model does.
        drafter_reads_hidden: whether it then reads the model's hidden states.
        drafts_blocks: whether it makes all drafts of a sequence at once.
        copy: the program that copies blocks.
        host: what swaps blocks; None = nothing does.
        settings: what the steps may be like.
        load_adapters: traces what writes these to the pool; None = there are none.
        adapters: what steps read of them; None = there are none.
        examples: images to compile the encoder for, see `jpaged.model_api.TakesImages`.
    """

    model: ModelPrograms
    drafter: ModelPrograms | None = None
    drafter_follows: bool = False
    drafter_reads_hidden: bool = False
    drafts_blocks: bool = False
    copy: Program
    host: HostStore | None = None
    buckets: Buckets
    spec: PoolSpec
    mesh: Mesh
    settings: StepSettings
    load_adapters: Callable[[], Compile] | None = None
    adapters: AdapterMatrices | None = None
    examples: tuple[tuple[Mapping[str, np.ndarray], int], ...] = ()

    # ------------------------------------------------------------------ which there are

    def all(self) -> Iterator[Shape]:
        """Yield every shape; the sampler's come after a step's, which gives the shape of hidden states."""
        yield from self._copies()
        if self.host is not None:
            yield from (Shape(name, trace) for name, trace in self.host.shapes(abstract_pool(self.spec, self.mesh)))
        yield from self._loads()
        yield from map(self.step, self.buckets.all)
        yield from self._encoders()
        yield from self._draws(self.buckets.sample_rows)
        if self.drafter is not None:
            yield from self._drafts()

    def first(self) -> list[Shape]:
        """Return the shapes that are compiled before the first request: `smallest`, then `needed`."""
        return [*self.smallest(), *self.needed()]

    def smallest(self) -> list[Shape]:
        """Return the smallest steps and sampler, in which a single greedy request is not padded. Those of `needed`,
        which hold theirs too, are left out."""
        needed = {shape.name for shape in self.needed()}
        steps = map(self.step, (*self.buckets.decode[:1], *self.buckets.mixed[:1]))
        draws = self._draws(self.buckets.sample_rows[:1], self._samplers[:1])
        return [shape for shape in (*steps, *draws) if shape.name not in needed]

    def needed(self) -> list[Shape]:
        """Return the shapes with which every step can run that has no images of a size that is not known and asks for
        no more than `RANKED` likely tokens: the largest step in each of its forms, and the largest sampler."""
        steps = self.buckets.all if self.settings.deterministic else self.buckets.largest
        largest = self._draws(self.buckets.sample_rows[-1:], self._samplers[-1:])
        return [*self._loads(), *map(self.step, steps), *self._encoders(), *largest]

    def later(self) -> list[Shape]:
        """Return all other shapes: those that no other can replace, then the rest from few tokens on."""
        done = {shape.name for shape in self.first()}
        return sorted((shape for shape in self.all() if shape.name not in done), key=lambda shape: shape.size)

    def __len__(self) -> int:
        """Return how many shapes `all` yields."""
        swaps = 0 if self.host is None else self.host.num_shapes
        rows = len(self.buckets.sample_rows) if self.settings.draws else 0
        drafts = 0 if self.drafter is None else len(self._draft_buckets) + len(SAMPLERS) * rows
        drafts += len(self._read_buckets)
        steps = len(self.copy_sizes) + swaps + len(self.buckets.all) + len(list(self._encoders()))
        return steps + len(list(self._loads())) + len(self._samplers) * rows + drafts

    @property
    def copy_sizes(self) -> tuple[int, ...]:
        """Return the padded numbers of block copies that a launch can have."""
        if not self.spec.views:
            return ()
        return tuple(dict.fromkeys([min(16, self.settings.max_num_seqs), self.settings.max_num_seqs]))

    def _draws(self, each: Iterable[int], samplers: Iterable[tuple[int, str]] | None = None) -> Iterator[Shape]:
        """Yield the shapes of draws of these numbers of rows, by all variants of the sampler or some."""
        if self.settings.draws:
            for rows in each:
                yield from (self.sampler(rows, top, kind) for top, kind in samplers or self._samplers)

    @property
    def _samplers(self) -> tuple[tuple[int, str], ...]:
        return SAMPLERS[1:] if self.settings.deterministic else SAMPLERS

    def draft_bucket(self, tokens: int, seqs: int) -> Bucket:
        """Return the bucket of a pass that drafts: over a token of each sequence, or over a block."""
        if self.drafts_blocks and self.settings.deterministic:  # the one bucket of all steps holds no blocks
            return padded_bucket(self.settings.max_num_seqs, self.settings.max_num_seqs)
        return self.buckets.smallest(tokens=tokens, seqs=seqs)

    @property
    def _draft_buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets of steps that draft, or follow and read no hidden states."""
        if self.drafts_blocks:  # each token of a block has a row of the sampler in the step that verifies it
            most = self.settings.max_num_seqs
            return tuple(dict.fromkeys(self.draft_bucket(tokens, 1) for tokens in range(2, most + 1)))
        all_followed = self.drafter_follows and not self.drafter_reads_hidden
        return self._followed if all_followed else self.buckets.decode

    @property
    def _read_buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets of steps that follow and read hidden states."""
        return self._followed if self.drafter_reads_hidden else ()

    @property
    def _followed(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets.all if not bucket.adapters)

    def numbers_together(self, rows: np.ndarray) -> tuple[int, ...]:
        """Return how many images whose features take these rows of the pool the encoder may take at once, most
        first."""
        if self.settings.deterministic:
            return (1,)  # the bits of an image may not depend on others
        budget = self.settings.max_num_batched_tokens
        return numbers_together(image_group(self.spec), len(rows), budget, platform=platform(self.mesh))

    # ------------------------------------------------------------------ each of them

    def step(self, bucket: Bucket) -> Shape:
        """Return the shape of a step in a bucket."""

        def trace() -> Compile:
            batch = self._of_all(self.empty_batch(bucket))
            return self.model.prepare_step(
                with_abstract_matrices(batch, self.spec, self.mesh), self._last_tokens, bucket
            )

        return Shape(bucket.name, trace, bucket.tokens)

    def sampler(self, rows: int, top: int, kind: str) -> Shape:
        """Return the shape of a draw, to be traced after a step."""

        def trace() -> Compile:
            return self.model.prepare_sample(self._rows(rows), self._last_tokens, top)

        return Shape(sampler_name(kind, rows), trace, rows)

    def _copies(self) -> Iterator[Shape]:
        for size in self.copy_sizes:
            ids = self._of_all(np.full((len(self.spec.views), size), -1, np.int32))
            pool = abstract_pool(self.spec, self.mesh)
            yield Shape(f"block copy x{size}", partial(self.copy.prepare, ("copy", size), pool, ids, ids))

    def _loads(self) -> Iterator[Shape]:
        if self.load_adapters is not None:
            yield Shape("adapter load", self.load_adapters)
        if self.adapters is not None:
            yield from (Shape(name, trace) for name, trace in self.adapters.shapes())

    def _encoders(self) -> Iterator[Shape]:
        for arrays, count in self.examples:
            image_rows = no_rows(self.spec, count)
            for number in self.numbers_together(image_rows):
                (call,) = calls([[(arrays, image_rows)] * number], (number,))
                trace = partial(self.model.prepare_encode, *self._of_all(call[0]))
                yield Shape(f"image encoder, {number} x {count} features", trace)

    def _drafts(self) -> Iterator[Shape]:
        drafter = self.drafter
        assert drafter is not None

        def step(bucket: Bucket) -> Compile:
            batch = without_adapters(self.empty_batch(bucket))._replace(reads_all=None)
            return drafter.prepare_step(batch, self._last_tokens, bucket)

        def follow(bucket: Bucket) -> Compile:
            batch, target = without_adapters(self.empty_batch(bucket)), self.model.target_of(bucket)
            return drafter.prepare_follow(batch, self._last_tokens, bucket, target)

        for bucket in self._draft_buckets:
            yield Shape(f"drafting step, {bucket.tokens} tokens", partial(step, bucket), bucket.tokens)
        for bucket in self._read_buckets:
            yield Shape(f"drafting head, {bucket.name}", partial(follow, bucket), bucket.tokens)
        for rows in self.buckets.sample_rows:
            for top, kind in SAMPLERS:
                draw = partial(drafter.prepare_sample, self._rows(rows), self._last_tokens, top)
                yield Shape(f"{kind} drafting sampler, {rows} rows", draw, rows)

    def empty_batch(self, bucket: Bucket) -> StepBatch:
        """Return a batch of padding only.

        Raises:
            ValueError: layers cannot be computed as `deterministic` asks.
        """
        settings = self.settings
        if settings.deterministic:  # one program serves all steps
            bucket = replace(bucket, adapters=settings.adapters)
        sizes = {"max_num_seqs": settings.max_num_seqs, "max_model_len": settings.max_model_len}
        batch = empty_batch(bucket, self.spec, **sizes)
        if not settings.deterministic:
            return batch
        batch = batch._replace(reads_all=None)  # launches leave nothing out
        return empty_launch(batch, self.spec.caches) if bucket.decode_only else batch

    def _rows(self, rows: int) -> SamplingArrays:
        """Return the settings of greedy rows of each replica, with the edits' arrays as they lie on the device."""
        args = self._of_all(blank_rows(rows, self.settings.vocab_size))
        return args._replace(edits=jax.tree.map(self._on_device, args.edits))

    @property
    def _last_tokens(self) -> Any:
        return self._on_device(self._of_all(np.zeros(self.settings.max_num_seqs, np.int32)))

    def _on_device(self, array: np.ndarray) -> Any:  # a shape stands for an array where only tracing looks
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=own_sharding(self.mesh))

    def _of_all(self, of_one: T) -> T:
        return stack(self.mesh, [of_one] * num_replicas(self.mesh))


def compiled_in_threads(shapes: Iterable[Shape]) -> Iterator[str]:
    """Compile shapes, one an iteration, and yield their names: they are traced here, and compiled in threads."""
    with ThreadPoolExecutor(2, thread_name_prefix="jpaged-warmup") as threads:
        pending = deque[tuple[str, Future[None]]]()
        for shape in shapes:
            pending.append((shape.name, threads.submit(shape.trace())))
            while len(pending) > 4 or (pending and pending[0][1].done()):
                yield _finished(*pending.popleft())
        while pending:
            yield _finished(*pending.popleft())


def compile_at_low_priority(compile_it: Compile) -> None:
    """Compile traced programs in a thread of low priority (Linux), and wait for the end; see also `CompilerThreads`.

    Tracing is not done there: it holds the interpreter, which a step would wait for all the longer.
    """
    errors: list[BaseException] = []

    def run() -> None:
        set_niceness(threading.get_native_id(), NICENESS)
        try:
            compile_it()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="jpaged-compiler")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _finished(name: str, compiling: Future[None]) -> str:
    compiling.result()
    return name

"""Lists the shapes of an engine's steps, whose number is known before anything runs, and traces them.

Tracing takes shapes only, and no array that a step changes: any thread may do it while the engine runs, and for devices
that this machine lacks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.execution.batch import StepBatch, empty_batch, without_adapters
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.compile.buckets import Bucket, Buckets
from jpaged.execution.compile.compiler_threads import NICENESS, set_niceness
from jpaged.execution.deterministic import empty_launch, padded_bucket
from jpaged.execution.mesh import num_replicas, own_sharding, stack
from jpaged.execution.programs import Compile, ModelPrograms
from jpaged.execution.sampling.pair_tables import PairTables
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.sampling.sampling_batch import RANKED, blank_rows, in_pieces
from jpaged.execution.step_settings import StepSettings
from jpaged.execution.transfer.adapter_matrices import with_abstract_matrices
from jpaged.execution.work.base import PoolWork

T = TypeVar("T")
TABLES = ("first pairs of tables", "pairs of tables")
"""Names of the programs that write tables, see `PairTables`: the one that makes them, and the one that goes on."""


class SamplerKind(NamedTuple):
    """A variant of the sampler.

    Attributes:
        top: how many of the most likely tokens it can give back.
        tabled: whether it takes tables for lists of pairs, see `PairTables`.
    """

    name: str
    top: int
    tabled: bool = False

    def of(self, rows: int) -> str:
        """Return what people call it for a number of rows."""
        return f"{self.name} sampler, {rows} rows"


SAMPLERS = (SamplerKind("greedy", 0), SamplerKind("full", RANKED), SamplerKind("table", RANKED, tabled=True))
"""Variants of the sampler that are compiled ahead."""


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
        works: the kinds of work on the pool.
        settings: what the steps may be like.
        tables: writes the pairs of draws that are too many for the sampler.
    """

    model: ModelPrograms
    drafter: ModelPrograms | None = None
    drafter_follows: bool = False
    drafter_reads_hidden: bool = False
    drafts_blocks: bool = False
    works: tuple[PoolWork, ...] = ()
    buckets: Buckets
    spec: PoolSpec
    mesh: Mesh
    settings: StepSettings
    tables: PairTables

    # ------------------------------------------------------------------ which there are

    def all(self) -> Iterator[Shape]:
        """Yield every shape; the sampler's come after a step's, which gives the shape of hidden states."""
        yield from self._of_works(self.works)
        yield from map(self.step, self.buckets.all)
        yield from self._tables()
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
        draws = self._draws(self.buckets.sample_rows[:1], self._samplers(1)[:1])
        return [shape for shape in (*steps, *draws) if shape.name not in needed]

    def needed(self) -> list[Shape]:
        """Return the shapes with which every step can run that has no images of a size that is not known, asks for no
        more than `RANKED` likely tokens and edits no more logits than `Edit.room`: the largest step in each of its
        forms, and the largest sampler."""
        steps = self.buckets.all if self.settings.deterministic else self.buckets.largest
        largest = self._draws(self.buckets.sample_rows[-1:], SAMPLERS[1:2])
        return [*self._of_works(work for work in self.works if work.needed), *map(self.step, steps), *largest]

    def later(self) -> list[Shape]:
        """Return all other shapes: those that no other can replace, then the rest from few tokens on."""
        done = {shape.name for shape in self.first()}
        return sorted((shape for shape in self.all() if shape.name not in done), key=lambda shape: shape.size)

    def __len__(self) -> int:
        """Return how many shapes `all` yields."""
        works = len(list(self._of_works(self.works)))
        tables, draws = len(list(self._tables())), len(list(self._draws(self.buckets.sample_rows)))
        drafts = 0 if self.drafter is None else len(list(self._drafts()))
        return works + len(self.buckets.all) + tables + draws + drafts

    def _draws(self, each: Iterable[int], samplers: Iterable[SamplerKind] | None = None) -> Iterator[Shape]:
        """Yield the shapes of draws of these numbers of rows, by all variants of the sampler or some."""
        if self.settings.draws:
            for rows in each:
                yield from (self.sampler(rows, kind) for kind in samplers or self._samplers(rows))

    def _tables(self) -> Iterator[Shape]:
        """Yield what writes tables for the largest sampler, which makes all draws with tables."""
        if self.settings.draws:
            rows = self.buckets.sample_rows[-1]
            for begun, name in enumerate(TABLES):
                yield Shape(f"{name}, {rows} rows", partial(self._write_pairs, rows, bool(begun)))

    def _write_pairs(self, rows: int, begun: bool) -> Compile:
        (piece,) = in_pieces(
            self._of_all(blank_rows(rows, self.settings.vocab_size)), self.mesh, self.settings.vocab_size
        )
        return self.tables.prepare(self._placed(piece), self._last_tokens, begun=begun)

    def _samplers(self, rows: int) -> tuple[SamplerKind, ...]:
        """Return the variants of the sampler that are compiled ahead for a number of rows."""
        return self._kinds(rows)[1:] if self.settings.deterministic else self._kinds(rows)

    def _kinds(self, rows: int) -> tuple[SamplerKind, ...]:
        return tuple(kind for kind in SAMPLERS if not kind.tabled or rows == self.buckets.sample_rows[-1])

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

    # ------------------------------------------------------------------ each of them

    def step(self, bucket: Bucket) -> Shape:
        """Return the shape of a step in a bucket."""

        def trace() -> Compile:
            batch = self._of_all(self.empty_batch(bucket))
            return self.model.prepare_step(
                with_abstract_matrices(batch, self.spec, self.mesh), self._last_tokens, bucket
            )

        return Shape(bucket.name, trace, bucket.tokens)

    def sampler(self, rows: int, kind: SamplerKind) -> Shape:
        """Return the shape of a draw, to be traced after a step."""

        def trace() -> Compile:
            return self.model.prepare_sample(self._rows(rows, kind), self._last_tokens, kind.top)

        return Shape(kind.of(rows), trace, 0 if kind.tabled else rows)

    def _of_works(self, works: Iterable[PoolWork]) -> Iterator[Shape]:
        return (Shape(name, trace) for work in works for name, trace in work.shapes())

    def _drafts(self) -> Iterator[Shape]:
        drafter = self.drafter
        assert drafter is not None

        def step(bucket: Bucket) -> Compile:
            batch = without_adapters(self.empty_batch(bucket))
            if self.drafts_blocks:  # of one that follows, only the KV is read
                batch = batch._replace(reads_all=None)
            return drafter.prepare_step(batch, self._last_tokens, bucket)

        def follow(bucket: Bucket) -> Compile:
            batch, target = without_adapters(self.empty_batch(bucket)), self.model.target_of(bucket)
            return drafter.prepare_follow(batch, self._last_tokens, bucket, target)

        for bucket in self._draft_buckets:
            yield Shape(f"drafting step, {bucket.tokens} tokens", partial(step, bucket), bucket.tokens)
        for bucket in self._read_buckets:
            yield Shape(f"drafting head, {bucket.name}", partial(follow, bucket), bucket.tokens)
        for rows in self.buckets.sample_rows:
            for kind in self._kinds(rows):
                draw = partial(drafter.prepare_sample, self._rows(rows, kind), self._last_tokens, kind.top)
                yield Shape(f"{kind.name} drafting sampler, {rows} rows", draw, rows)

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

    def _rows(self, rows: int, kind: SamplerKind) -> SamplingArrays:
        """Return the settings of greedy rows of each replica, as a worker gives them to a sampler."""
        args = self._placed(self._of_all(blank_rows(rows, self.settings.vocab_size)))
        return self.tables.shapes(args, self._last_tokens) if kind.tabled else args

    def _placed(self, args: SamplingArrays) -> SamplingArrays:
        return jax.tree.map(self._on_device, args)._replace(position=args.position)

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

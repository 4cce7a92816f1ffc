"""Owns the device state and the programs that run on it. Its calls take host values only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from jpaged.execution.batch import StepBatch
from jpaged.execution.caches.pool import DonatedPool, PoolSpec, make_zero_pages
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.compile.program import Compilations, Program
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.deterministic import launches
from jpaged.execution.drafts import DraftProgram
from jpaged.execution.mesh import num_replicas, platform, replicate, stack, to_host
from jpaged.execution.packing import Packed, opened
from jpaged.execution.pooling import HiddenStates
from jpaged.execution.programs import ModelPrograms, TargetAndDraft
from jpaged.execution.readouts.prompt_scores import ScoreOutput
from jpaged.execution.sampling.pair_tables import PairTables
from jpaged.execution.sampling.sample_step import StepOutput
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.sampling.sampling_batch import PlacedRows
from jpaged.execution.step_settings import StepSettings
from jpaged.execution.transfer.pool_blocks import PoolBlocks
from jpaged.execution.transfer.tiers import BlockThread
from jpaged.execution.work.base import WorkContext
from jpaged.execution.work.registry import pool_works
from pallas_kernels.zero_pages import frees_memory

P = ParamSpec("P")
R = TypeVar("R")


class Announcing(Protocol):
    """Has device calls, see `device_call`."""

    announce: Callable[[str, tuple[Any, ...]], None]
    """Called with the name and arguments of every device call before it is made."""
    failed: Callable[[BaseException], None]
    """Called with the exception of a device call, which other processes may have made too."""


W = TypeVar("W", bound=Announcing)

DEVICE_CALLS: set[str] = set()
"""Names of the methods that `device_call` marks."""


def device_call(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Mark a method that every process of an engine calls, in one order: `announce` is called before it, and `failed`
    with its exception. Arguments are positional."""

    @wraps(method)
    def call(self: W, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs
        self.announce(method.__name__, args)
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self.failed(error)
            raise

    DEVICE_CALLS.add(method.__name__)
    return call


def _noop(*args: Any) -> None:
    """Do nothing: one process holds the whole mesh, and no other makes its calls."""


Tokens: TypeAlias = Int[jax.Array, " max_seqs"]


class Worker:
    """Owns the device state, the pool (donated to every step) and the last step's tokens, and the model's programs.

    Its device calls take host values only and start programs in the order they come in. So several processes that
    hold parts of one mesh stay together when each makes the same calls. On a data-parallel mesh arguments are stacked,
    and results too; see `replicas`.

    Args:
        settings: what the steps may be like.
        can_swap: whether blocks may be swapped to the host.
        draft: what drafts; None = nothing does.
        programs: where the model's programs are loaded from, or collected for; None = neither.
        examples: images to compile the encoder for, see `jpaged.model_api.TakesImages`.
        tiers: write blocks to each tier below the pool and read them.

    Attributes:
        models: weights and programs of the model, and of what drafts.
        announce: called with the name and arguments of every device call before it is made.
        failed: called with the exception of a device call.
        blocks: copies blocks of the pool to be saved, and back.
        works: the kinds of work on the pool by name, in the order in which they run.
        tables: writes the pairs of draws that are too many for the sampler.
        host: blocks in host memory.
        fetch: brings arrays to the host when the device is done with them.
        frees_memory: whether `give_back` does anything.
        compilations: what was compiled so far.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        spec: PoolSpec,
        mesh: Mesh,
        *,
        settings: StepSettings,
        can_swap: bool = False,
        draft: DraftProgram | None = None,
        examples: tuple[tuple[Mapping[str, np.ndarray], int], ...] = (),
        programs: ProgramStore | None = None,
        tiers: Sequence[BlockThread] = (),
    ) -> None:
        self.spec = spec
        self.mesh = mesh
        self.announce: Callable[[str, tuple[Any, ...]], None] = _noop
        self.failed: Callable[[BaseException], None] = _noop
        self.fetch: Callable[[Any], Any] = to_host
        self.compilations = Compilations()
        self.programs = programs
        self.frees_memory = platform(mesh) == "cpu" and frees_memory()
        self._deterministic = settings.deterministic
        self._together = settings.together
        on_compile = self.compilations.begin, self.compilations.end
        self.models = TargetAndDraft(
            graphdef,
            params,
            spec,
            mesh,
            on_compile,
            draft=draft,
            store=programs,
            scored=settings.scores_draws,
            alone=settings.alone,
        )
        self._zero = Program(make_zero_pages(mesh), lambda _: None, made_of=("zero pages", mesh))
        context = WorkContext(
            spec=spec,
            mesh=mesh,
            settings=settings,
            model=self.models.model,
            on_compile=on_compile,
            store=programs,
            can_swap=can_swap,
            tiers=tiers,
            examples=examples,
        )
        self.works = pool_works(context)
        self.host = context.host
        self.blocks = PoolBlocks(context.mover)
        self._max_num_seqs = settings.max_num_seqs
        self.tables = PairTables(mesh, settings.vocab_size, *on_compile, store=programs)
        self._rows = PlacedRows(mesh, settings.vocab_size, self.tables)
        self._begin()

    def _begin(self) -> None:
        """Make the state that the device calls go on from."""
        self._pool = DonatedPool(self.spec, self.mesh)
        self._sampled: jax.Array | None = None
        self._hidden = HiddenStates()
        tokens = [np.zeros(self._max_num_seqs, np.int32)] * num_replicas(self.mesh)
        self._last_tokens = replicate(stack(self.mesh, tokens), self.mesh)

    @property
    def pool(self) -> jax.Array:
        """Return the pool, once all calls made so far are done."""
        return self._pool.array

    @pool.setter
    def pool(self, pool: jax.Array) -> None:
        self._pool.array = pool

    @property
    def last_tokens(self) -> Tokens:
        """Return the tokens that the last step drew, by row of its sampler."""
        return self._last_tokens

    @last_tokens.setter
    def last_tokens(self, tokens: Int[np.ndarray, " max_seqs"]) -> None:
        self._last_tokens = replicate(tokens, self.mesh)

    @property
    def num_compiled(self) -> int:
        """Return how many shapes of step, sampler, block copy and swap were compiled so far."""
        return self.compilations.count

    @property
    def num_recompiles(self) -> int:
        """Return how many shapes were compiled after a warm-up."""
        return self.compilations.num_recompiles

    @property
    def model(self) -> ModelPrograms:
        """Return the weights and programs of the model."""
        return self.models.model

    # ------------------------------------------------------------------ device calls

    @device_call
    def restart(self) -> None:
        """Begin anew with an empty pool and nothing swapped out.

        A call that failed may have taken the pool, which is donated, without giving one back; and when results turn out
        to be errors only as they are fetched, so is all that was computed from them.
        """
        for work in self.works.values():
            work.restart()
        self._pool.delete()  # there may be no room for two
        self._begin()

    @device_call
    def release(self) -> None:
        """Free the memory of the pool and of swapped blocks, until `restart`."""
        for work in self.works.values():
            work.release()
        self._pool.delete()
        self._sampled = None
        self._hidden.begin()

    @device_call
    def work(self, kind: str, *args: Any) -> None:
        """Do work of a kind on whole blocks of the pool, see `PoolWork.run`."""
        self.pool = self.works[kind].run(self.pool, *args)

    @device_call
    def give_back(self, unused: Bool[np.ndarray, "replicas pages"]) -> None:
        """Return the memory of unused large pages to the system, where the platform can; they read as zeros."""
        if self.frees_memory:
            shards = np.repeat(unused, self.spec.shards, axis=0)
            with jax.transfer_guard_host_to_device("allow"):  # a trainer may forbid it, but means weights
                self.pool = self._zero("zero pages", self.pool, shards)

    @device_call
    def compute(self, batch: StepBatch | Packed, bucket: Bucket, num_samples: int) -> None:
        """Run the model on a batch of `bucket`'s shape; `score` and `draw` go on from it."""
        self._sampled = None
        self._hidden.begin(bucket.tokens if self._deterministic else None)
        if isinstance(batch, StepBatch):  # else no layer takes what the device has, see `LayerCache.follows`
            for work in self.works.values():
                batch = work.given(self.pool, batch)
        if not self._deterministic:
            self._sampled = self._run(batch, bucket)
            return
        cut = launches(opened(batch), num_samples, self.spec.caches, images=bucket.images, together=self._together)
        for launch in cut:
            self._hidden.expect(launch.rows, launch.bucket.tokens)
            rows = self._run(launch.batch, launch.bucket)
            self._sampled = rows if self._sampled is None else jnp.where(launch.here[:, None], rows, self._sampled)

    @device_call
    def score(
        self, rows: Int[np.ndarray, "*replicas rows"], targets: Int[np.ndarray, "*replicas rows"], top: int
    ) -> ScoreOutput:
        """Return the log-probabilities of `targets` after tokens `rows` of the last `compute`."""
        return self.model.score(self._hidden.whole(), self._hidden.rows_of(rows), targets, top)

    @device_call
    def pool_hidden(self, owners: Int[np.ndarray, "*replicas tokens"], size: int, largest: bool) -> jax.Array:
        """Return sums of the last `compute`'s hidden states, [*replicas, size, embed], or the largest of each column;
        `owners` says which row a token is in."""
        return self.model.pool_hidden(self._hidden.whole(), self._hidden.by_row(owners, size), size, largest)

    @device_call
    def draw(self, args: SamplingArrays, top: int) -> StepOutput:
        """Sample the next tokens after the last `compute`, which is thereby over."""
        assert self._sampled is not None, "compute comes before draw"
        placed = self._rows.put(args, self._last_tokens)
        output = self.model.sample(self._sampled, placed, self._last_tokens, top)
        self._last_tokens = output.tokens
        self._sampled = None
        self._hidden.begin()
        return output

    @device_call
    def draft(self, batch: StepBatch, bucket: Bucket, args: SamplingArrays, top: int) -> Tokens:
        """Run the drafting program on a batch and draw from it; the last tokens, which the next `compute` reads, do
        not change."""
        drafter = self.models.drafter
        assert drafter is not None, "an engine without a drafter was asked for drafts"
        if self._deterministic and bucket.decode_only:  # a launch, as what follows a step gets
            batch = next(launches(batch, int(batch.query_starts[-1]), self.spec.caches)).batch
        self.pool, rows, _ = drafter.step(self.pool, batch, self._last_tokens, bucket)
        placed = self._rows.put(args, self._last_tokens)
        tokens: Any = drafter.sample(rows, placed, self._last_tokens, top).tokens
        return tokens

    def make_call(self, name: str, args: tuple[Any, ...]) -> None:
        """Make the device call of this name, as another process announced it.

        Raises:
            ValueError: `name` is the name of no device call; nothing else of a worker can be called so.
        """
        if name not in DEVICE_CALLS:
            raise ValueError(f"{name!r} is no device call; a worker's are {sorted(DEVICE_CALLS)}")
        getattr(self, name)(*args)

    def _run(self, batch: StepBatch | Packed, bucket: Bucket) -> jax.Array:
        self.pool, sampled, hidden, *within = self.model.step(self.pool, batch, self._last_tokens, bucket)
        if self.models.drafter_follows:
            (target,) = within or [hidden]
            self.pool = self.models.follow(self.pool, opened(batch), self._last_tokens, bucket, target)
        self._hidden.add(hidden)
        return sampled

    # ------------------------------------------------------------------ the end

    @device_call
    def close(self) -> None:
        """Free all device memory at once, except weights that the caller holds too; no call may follow."""
        for work in self.works.values():
            work.close()
        with contextlib.suppress(Exception):  # a pool that was never made, or was lost to a failed call
            self._pool.delete()
        self._rows.clear()
        self._sampled = None
        self._hidden.begin()
        self._last_tokens.delete()
        self._zero.forget()
        self.models.close()

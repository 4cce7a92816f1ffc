"""Holds the programs of one model: its step, its sampler and the scores of its prompts, with the weights they take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jpaged.execution.batch import StepBatch, without_adapters
from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import PoolSpec, abstract_pool
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.compile.program import Program
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.drafts import DraftProgram
from jpaged.execution.encode import between_parts, make_encode, make_encode_part
from jpaged.execution.mesh import HostOrDevice, is_local, own_shapes, own_sharding
from jpaged.execution.packing import Packed, pack
from jpaged.execution.params import check_like, float32_shapes, num_compact, plain_dict, to_float32
from jpaged.execution.pooling import make_pool_hidden
from jpaged.execution.readouts.prompt_scores import ScoreOutput, make_score
from jpaged.execution.resharding import cuts_on_devices, reshard
from jpaged.execution.sampling.sample_step import ScreenedHead, StepOutput, make_sample_step
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.step import make_follow, make_step
from pallas_kernels.platform import Impl
from pallas_kernels.screened_argmax import Screen

Compile = Callable[[], None]
"""Compiles what was traced; may be called in any thread."""


class _Kernels(TypedDict):
    """Says which groups and kernels a model's layers use."""

    prefix: str
    kernel_impl: Impl | None


class ModelPrograms:
    """Holds the programs and weights of one model, and nothing that a step changes: pool and tokens come in and go out,
    so a worker may hold several models over one pool.

    Args:
        graphdef: the model without its weights.
        params: the weights, on `mesh`.
        spec: the pool that holds what the model's layers keep.
        prefix: what the names of the model's layer groups begin with in `spec`.
        store: where the programs are loaded from, or collected for, see `Program`.
        on_compile, on_compiled: called with each shape before and after it is compiled, see `Program`.
        kernel_impl: which kernels run; None = what this process's platform is best at.
        scored: whether every draw has log-probabilities; else the plain sampler may do without, see `ScreenedHead`.
        followed, taps, alone: see `make_step`.

    Attributes:
        num_updates: how often the weights were replaced.
        described: shapes, dtypes and shardings of the weights, which hold no memory.
        screen: what the plain sampler reads of the vocabulary's table instead of all of it; None = nothing.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        spec: PoolSpec,
        mesh: Mesh,
        on_compile: Callable[[Hashable], None],
        on_compiled: Callable[[Hashable, float], None] = lambda shape, seconds: None,
        *,
        prefix: str = "",
        store: ProgramStore | None = None,
        kernel_impl: Impl | None = None,
        scored: bool = True,
        followed: bool = False,
        taps: bool = False,
        alone: bool = False,
    ) -> None:
        self._spec = spec
        self._mesh = mesh
        self._graphdef = graphdef
        self._scored = scored
        self._kernel_impl = kernel_impl
        callbacks, step_of, rest_of = (on_compile, on_compiled), (graphdef, spec, mesh, prefix), (graphdef, mesh)

        def program(kind: str, function: jax.stages.Wrapped, *made_of: Hashable) -> Program:
            return Program(function, *callbacks, (kind, *made_of), kind=prefix + kind, store=store)

        kernels: _Kernels = {"prefix": prefix, "kernel_impl": kernel_impl}
        step = make_step(graphdef, spec, mesh, followed=followed, taps=taps, alone=alone, **kernels)
        # A store knows programs by kind and shapes only.
        self._step = program(f"step, {followed=}, {taps=}, {alone=}", step, *step_of)
        self._follow = program("follow", make_follow(graphdef, spec, mesh, **kernels), *step_of)
        self._sample = program("sample", make_sample_step(graphdef, mesh), *rest_of)
        self._encode = program("encode", make_encode(graphdef, spec, mesh, **kernels), *step_of)
        self._encode_part = program("encode part", make_encode_part(graphdef, spec, mesh, **kernels), *step_of)
        self._score = program("score", make_score(graphdef, mesh), *rest_of)
        self._pool_hidden = Program(make_pool_hidden(mesh), *callbacks, ("pool hidden", mesh))
        self.num_updates = 0
        self._describe(params)
        self._set_params(params)

    @property
    def params(self) -> Any:
        """Return the weights; None while they are released."""
        return self._params

    def _set_params(self, params: Any) -> None:
        self._params, self._on_host = params, None
        self._weights = {} if params is None else plain_dict(params)
        self.screen: Screen | None = None
        if self._head is not None and params is not None:
            self.screen = self._head.screen(self._weights)

    def _describe(self, params: Any) -> None:
        self.described = jax.tree.map(_described, params)
        self._shapes = plain_dict(self.described)
        self._between_parts: dict[Hashable, Any] = {}
        self._head = None if self._scored else ScreenedHead(self._graphdef, self._shapes, self._mesh)

    @property
    def num_compact(self) -> int:
        """Return how many matrices are not held as arrays, see `jpaged.execution.params`."""
        return num_compact(self.described)

    def hold_as_float32(self) -> None:
        """Hold all matrices as arrays from now on; programs are compiled again. The weights are on the devices."""
        if self.num_compact:
            self.take(to_float32(self._params))

    def take(self, params: Any) -> None:
        """Set the weights; where they are held otherwise than before, let go of programs that take the old form."""
        form: Any = jax.tree.structure(self.described)  # mypy finds no comparison in what jax calls a PyTreeDef
        if params is not None and jax.tree.structure(params) != form:
            self._describe(params)
            self._forget_programs()
        self._set_params(params)

    def _forget_programs(self) -> None:
        encoders = self._encode, self._encode_part
        for program in (self._step, self._follow, self._sample, self._score, *encoders, self._pool_hidden):
            program.forget()

    def check_local(self, caller: str) -> None:
        """Raise RuntimeError, naming the caller, where the mesh spans several processes."""
        if not is_local(self._mesh):
            raise RuntimeError(f"{caller} over {jax.process_count()} processes: this one has not all of the weights")

    def placed(self, new: Any, *, copy: bool = False) -> Any:
        """Return other weights of the same structure, shapes and dtypes, placed where the engine's belong: from device
        to device, and not at all where they lie there already. Arrays may stand where `hold_as_float32` would put some.

        Args:
            copy: whether the arrays are new ones even then.

        Raises:
            ValueError: `new` does not fit; the message names the first leaf that differs, and the old weights stay.
            RuntimeError: the mesh spans several processes, of which only this one has the new ones.
        """
        self.check_local("update_params()")
        return reshard(new, self._shardings_of(new), copy=copy)

    def cuts_on_devices(self, new: Any) -> bool:
        """Tell whether `placed` runs programs on the engine's devices, which then must run no others.

        Raises:
            ValueError: as `placed`.
        """
        return cuts_on_devices(new, self._shardings_of(new))

    def _shardings_of(self, new: Any) -> Any:
        held = self.described  # once: another thread may turn the weights to float32
        form: Any = jax.tree.structure(held)
        like = held if jax.tree.structure(new) == form else float32_shapes(held)
        check_like(new, like)
        return jax.tree.map(lambda leaf: leaf.sharding, like)

    def update_params(self, new: Any) -> None:
        """Swap the weights for others, see `placed`; where arrays take the place of what is held in bfloat16, programs
        are compiled again.

        Raises:
            ValueError, RuntimeError: as `placed`; the old weights stay.
        """
        placed = self.placed(new)
        self.num_updates += 1
        self.take(placed)

    def share_params(self, other: ModelPrograms) -> None:
        """Take over the weights of programs that take the same."""
        self.take(other._params)

    @property
    def has_params(self) -> bool:
        """Tell whether the weights are on the devices."""
        return self._params is not None

    @property
    def can_have_params(self) -> bool:
        """Tell whether the weights are on the devices, or can be put there by `restore_params`."""
        return self._params is not None or self._on_host is not None

    def release_params(self, *, keep: bool) -> None:
        """Release the weights; they stay alive if the caller holds them. If they have left the devices already, the
        host's copy is kept or released.

        Args:
            keep: whether the host keeps them for `restore_params`.
        """
        if not keep:
            self._on_host = None
        elif self._params is not None:
            self._on_host = jax.device_get(self._params)
        self._params, self._weights, self.screen = None, {}, None

    def restore_params(self) -> bool:
        """Put the weights back that the host keeps; return whether there are any on the devices then."""
        if self._params is None and self._on_host is not None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.described)
            self._set_params(jax.device_put(self._on_host, shardings))
        return self._params is not None

    def close(self) -> None:
        """Release the weights and all compiled programs."""
        self._params, self._weights, self._on_host, self.screen = None, {}, None, None
        self._forget_programs()

    # ------------------------------------------------------------------ running

    def step(
        self,
        pool: Pool,
        batch: StepBatch | Packed,
        last_tokens: Int[HostOrDevice, " max_seqs"],
        bucket: Bucket,
    ) -> tuple[Any, ...]:
        """Run the model on a batch of `bucket`'s shape; see `make_step`. The pool is donated."""
        packed = pack(self._mesh, batch)
        return self._step(("step", bucket), self._weights, pool, packed, last_tokens, decode_only=bucket.decode_only)

    def follow(
        self,
        pool: Pool,
        batch: StepBatch,
        last_tokens: Int[HostOrDevice, " max_seqs"],
        bucket: Bucket,
        target: Float[Array, "tokens states"],
    ) -> Pool:
        """Run a head that drafts over tokens that the model has computed; see `make_follow`. The pool is donated."""
        packed, static = pack(self._mesh, batch), {"decode_only": bucket.decode_only}
        return self._follow(("follow", bucket), self._weights, pool, packed, last_tokens, target, **static)

    def encode(
        self, pool: Pool, arrays: Mapping[str, HostOrDevice], rows: Int[HostOrDevice, "*replicas images features"]
    ) -> Pool:
        """Encode images and leave their features in the pool, which is donated; see `make_encode`."""
        return self._encode(_encode_key(arrays, rows), self._weights, pool, arrays, rows)

    def encode_part(
        self,
        pool: Pool,
        state: Any,
        arrays: Mapping[str, Array],
        rows: Int[HostOrDevice, "*replicas images features"],
        part: Int[HostOrDevice, "*replicas 2"],
    ) -> tuple[Pool, Any]:
        """Encode images in part; see `make_encode_part`. Pool and state are donated."""
        return self._encode_part(_part_key(arrays, rows), self._weights, pool, state, arrays, rows, part)

    def between_parts(self, arrays: Mapping[str, HostOrDevice]) -> Any:
        """Return the shapes of the state of `encode_part` for rows like these. They are traced once: streams would wait
        for that whenever an image is begun."""
        key = _array_shapes(arrays)
        if key not in self._between_parts:
            self._between_parts[key] = between_parts(
                self._graphdef, self._shapes, self._mesh, arrays, self._kernel_impl
            )
        return self._between_parts[key]

    def sample(
        self,
        hidden: Float[Array, "max_seqs embed"],
        args: SamplingArrays,
        last_tokens: Int[HostOrDevice, " max_seqs"],
        top: int,
    ) -> StepOutput:
        """Draw the tokens that follow a step's sampled rows; see `make_sample_step`."""
        screen = None if top else self.screen
        return self._sample(_sample_key(args, top), self._weights, hidden, args, last_tokens, screen, top=top)

    def score(
        self,
        hidden: Float[Array, "*replicas tokens embed"],
        rows: Int[HostOrDevice, "*replicas rows"],
        targets: Int[HostOrDevice, "*replicas rows"],
        top: int,
    ) -> ScoreOutput:
        """Return the log-probabilities of `targets` after a step's tokens `rows`; see `make_score`."""
        return self._score(("score", hidden.shape[-2], top), self._weights, hidden, rows, targets, top=top)

    def pool_hidden(
        self,
        hidden: Float[Array, "*replicas tokens embed"],
        owners: Int[HostOrDevice, "*replicas tokens"],
        size: int,
        largest: bool,
    ) -> Float[Array, "*replicas size embed"]:
        """Return sums of a step's hidden states, or the largest of each column; see `make_pool_hidden`."""
        shape = "pool hidden", hidden.shape[-2], size, largest
        return self._pool_hidden(shape, hidden, owners, size=size, largest=largest)

    # ------------------------------------------------------------------ compiling ahead

    def has_step(self, bucket: Bucket) -> bool:
        """Tell whether `step` is compiled for a bucket."""
        return self._step.has(("step", bucket))

    def has_sample(self, args: SamplingArrays, top: int) -> bool:
        """Tell whether `sample` is compiled for arrays like these."""
        return self._sample.has(_sample_key(args, top))

    def prepare_step(self, batch: StepBatch, last_tokens: Int[HostOrDevice, " max_seqs"], bucket: Bucket) -> Compile:
        """Trace `step` for these shapes; return a call that compiles it."""
        pool, static = abstract_pool(self._spec, self._mesh), {"decode_only": bucket.decode_only}
        return self._step.prepare(("step", bucket), self._shapes, pool, pack(self._mesh, batch), last_tokens, **static)

    def prepare_follow(
        self,
        batch: StepBatch,
        last_tokens: Int[HostOrDevice, " max_seqs"],
        bucket: Bucket,
        target: jax.ShapeDtypeStruct,
    ) -> Compile:
        """Trace `follow` for these shapes."""
        pool, static = abstract_pool(self._spec, self._mesh), {"decode_only": bucket.decode_only}
        packed = pack(self._mesh, batch)
        return self._follow.prepare(("follow", bucket), self._shapes, pool, packed, last_tokens, target, **static)

    def target_of(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        """Return what a head reads of a step in `bucket`, as shapes, after a `prepare_step`."""
        *_, states = self._step.out_info
        shape = (*states.shape[:-2], bucket.tokens, states.shape[-1])
        return jax.ShapeDtypeStruct(shape, states.dtype, sharding=own_sharding(self._mesh))

    def prepare_encode(
        self, arrays: Mapping[str, HostOrDevice], rows: Int[HostOrDevice, "*replicas images features"]
    ) -> Compile:
        """Trace `encode` for these shapes."""
        pool = abstract_pool(self._spec, self._mesh)
        return self._encode.prepare(_encode_key(arrays, rows), self._shapes, pool, arrays, rows)

    def prepare_encode_part(
        self,
        arrays: Mapping[str, HostOrDevice],
        rows: Int[HostOrDevice, "*replicas images features"],
        part: Int[HostOrDevice, "*replicas 2"],
    ) -> Compile:
        """Trace `encode_part` for these shapes."""
        pool, state = abstract_pool(self._spec, self._mesh), self.between_parts(arrays)
        key, sent = _part_key(arrays, rows), own_shapes(dict(arrays), self._mesh)
        return self._encode_part.prepare(key, self._shapes, pool, state, sent, rows, part)

    def prepare_sample(self, args: SamplingArrays, last_tokens: Int[HostOrDevice, " max_seqs"], top: int) -> Compile:
        """Trace `sample` for these shapes, after a `prepare_step`, which knows the hidden states."""
        _, hidden, *_ = self._step.out_info
        hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=own_sharding(self._mesh))
        screen = None if top or self._head is None else self._head.shapes
        return self._sample.prepare(_sample_key(args, top), self._shapes, hidden, args, last_tokens, screen, top=top)


def _described(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _encode_key(arrays: Mapping[str, HostOrDevice], rows: HostOrDevice) -> Hashable:
    return "encode", rows.shape, _array_shapes(arrays)


def _array_shapes(arrays: Mapping[str, HostOrDevice]) -> Hashable:
    return tuple((name, array.shape) for name, array in sorted(arrays.items()))


def _part_key(arrays: Mapping[str, HostOrDevice], rows: HostOrDevice) -> Hashable:
    return "encode part", _encode_key(arrays, rows)


def _sample_key(args: SamplingArrays, top: int) -> Hashable:
    return "sample", args.position.shape[-1], args.tabled, top


class _HeadWeights:
    """Holds the parameters of a head that are not the model's.

    Args:
        own: on the devices.
        tables: see `DraftProgram`.
    """

    def __init__(self, own: Any, tables: tuple[str, ...]) -> None:
        self._own: Any = plain_dict(own)
        self._tables = tables
        self._on_host: Any = None
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, self._own)

    def with_tables_of(self, model: ModelPrograms) -> Any:
        """Return all parameters of the head, put back on the devices; None where the model's are not there."""
        if model.params is None:
            return None
        if self._own is None:
            self._own, self._on_host = jax.device_put(self._on_host, self._shardings), None
        held = plain_dict(model.params)
        # A model whose vocabulary has one table holds it as its embedding.
        return self._own | {name: held[name if name in held else "embed_tokens"] for name in self._tables}

    def release(self) -> None:
        """Move the parameters to the host, until the model's are on the devices again."""
        if self._own is not None:
            self._own, self._on_host = None, jax.device_get(self._own)


class TargetAndDraft:
    """Holds two models over one pool, or one where nothing drafts.

    Args:
        graphdef, params, spec, mesh, store: see `ModelPrograms`.
        draft: what drafts; None = nothing does.
        scored, alone: see `ModelPrograms`.
        callbacks: `on_compile` and `on_compiled` of `ModelPrograms`.

    Attributes:
        model: weights and programs of the model.
        drafter: weights and programs of the drafter; None = no drafter.
        drafter_follows: see `DraftProgram.has_groups`.
        drafter_reads_hidden: whether it then reads the model's hidden states.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        spec: PoolSpec,
        mesh: Mesh,
        callbacks: tuple[Callable[[Hashable], None], Callable[[Hashable, float], None]],
        *,
        draft: DraftProgram | None,
        store: ProgramStore | None,
        scored: bool = True,
        alone: bool = False,
    ) -> None:
        self.drafter_reads_hidden = reads = draft is not None and draft.tables is not None
        taps = () if draft is None else draft.taps
        if taps:
            tapped: Any = nnx.merge(graphdef, params)
            tapped.tap(taps)
            graphdef = nnx.split(tapped)[0]
        self.model = ModelPrograms(
            graphdef,
            params,
            spec,
            mesh,
            *callbacks,
            store=store,
            scored=scored,
            followed=reads,
            taps=bool(taps),
            alone=alone,
        )
        self.drafter: ModelPrograms | None = None
        self._head: _HeadWeights | None = None
        if draft is not None:
            weights = params if draft.params is None else draft.params
            if draft.tables is not None:
                self._head = _HeadWeights(draft.params, draft.tables)
                weights = self._head.with_tables_of(self.model)
            self.drafter = ModelPrograms(draft.graphdef, weights, spec, mesh, *callbacks, prefix=draft.prefix)
        self.drafter_follows = draft is not None and draft.has_groups
        self._drafter_has_weights = draft is not None and draft.params is not None and self._head is None

    def follow(
        self, pool: jax.Array, batch: StepBatch, last_tokens: jax.Array, bucket: Bucket, target: jax.Array
    ) -> jax.Array:
        """Run a drafter that follows over the tokens that the model has computed; return the pool, which is donated.

        Args:
            target: the last result of the model's step, of which a head reads all, [tokens, states].
        """
        assert self.drafter is not None and self.drafter_follows
        plain, like = without_adapters(batch), replace(bucket, adapters=False)
        if self.drafter_reads_hidden:
            return self.drafter.follow(pool, plain, last_tokens, like, target)
        return self.drafter.step(pool, plain, last_tokens, like)[0]

    def _share(self) -> None:
        """Let the drafter take over the weights that it has in common with the model, as they are now."""
        if self.drafter is None or self._drafter_has_weights:
            return
        if self._head is None:
            self.drafter.share_params(self.model)
        else:
            self.drafter.take(self._head.with_tables_of(self.model))

    def update_params(self, new: Any) -> None:
        """Swap the model's weights, see `ModelPrograms.update_params`; its first layers draft with the new ones too.
        So does a head, with their tables."""
        self.model.update_params(new)
        self._share()

    def hold_as_float32(self) -> None:
        """Hold the model's weights as arrays from now on, see `ModelPrograms.hold_as_float32`."""
        self.model.hold_as_float32()
        self._share()

    def release_params(self, *, keep: bool) -> None:
        """Release the weights, see `ModelPrograms.release_params`; the host keeps those of a draft model or
        head."""
        self.model.release_params(keep=keep)
        if self.drafter is not None and self._drafter_has_weights:
            self.drafter.release_params(keep=True)
        if self._head is not None:
            self._head.release()
        self._share()

    def restore_params(self) -> bool:
        """Put back the weights that the host keeps, all or none; return whether all are on the devices then."""
        if not self.model.can_have_params:
            return False
        there = self.model.restore_params()
        if self.drafter is not None and self._drafter_has_weights:
            there = self.drafter.restore_params() and there
        self._share()
        return there

    def close(self) -> None:
        """Release the weights and all compiled programs."""
        for programs in filter(None, (self.model, self.drafter)):
            programs.close()

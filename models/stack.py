"""Runs the layer stack: a loop over the repeats of a pattern of layers, whose weights are stacked or not.

Scanning keeps the program's size independent of depth; the paged cache is part of the scan's carry, so that it is
updated in place. Layers that are not stacked are looped over too, with a `PerLayerWeights` for each matrix: XLA:CPU
would copy each layer's weights out of a stack at every step. So would XLA:GPU, but it has to ask the host which branch
of a `PerLayerWeights` to take: there, with Triton's attention, the layers follow one another (`BuildContext.unrolled`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource
from pallas_kernels.held_matrix import is_held
from pallas_kernels.stacked_row import StackedRow, StackedTable

from .linear import LiveRows
from .parameters import LayerTable, LayerVector
from .per_layer_weights import choose
from .rope import RotaryTables


@dataclass(frozen=True)
class LayerKind:
    """Says all that distinguishes a layer's program from another's; layers of one kind can share a scan.

    Attributes:
        group: the `LayerGroup` whose memory the layer uses; None if it keeps none.
        variant: whatever else changes the layer's parameters or code, e.g. ``"experts"``.
        shares_kv: the layer keeps no KV and reads that of the last layer of its group that does.
    """

    group: str | None
    variant: Hashable = None
    shares_kv: bool = False


@dataclass(frozen=True)
class Read:
    """The tokens whose last layer's result is read; other rows may be left out.

    Attributes:
        last_keys: the position of the last token that each token sees: its own, or -1 where the result is not read.
        rows: how many rows, the first ones, hold all results that are read.
    """

    last_keys: Int[Array, " tokens"]
    rows: Int[Array, ""]


@dataclass(frozen=True)
class Shared:
    """The arguments of a call that all layers share.

    Attributes:
        tables: each group's `Rotary.tables`, by its name; None where nothing is rotated.
        live_rows: see `jpaged.model_api.CausalLM.__call__`.
        growth: factor of each token's queries, by a group's name; groups whose queries do not grow are left out.
        per_layer: vectors of each token for every layer; each layer gets its own. None if the model has none.
        every: a layer's `read` if all results are read.
        read: the tokens whose results of the last layer are read; None = all. Each layer gets the tokens whose results
            of that layer are read.
        last: the number of the last layer, if there is `read`.
        added: what is added to the tokens' hidden states after each of the first layers; None = nothing.
    """

    tables: Mapping[str, RotaryTables | None]
    live_rows: LiveRows = None
    growth: Mapping[str, Float[Array, " tokens"]] = field(default_factory=dict)
    per_layer: Float[Array, "layers tokens width"] | Float[Array, "tokens width"] | None = None
    every: Read | None = None
    read: Read | None = None
    last: int | None = None
    added: Float[Array, "layers tokens embed"] | None = None

    def of_layer(self, number: int | Array) -> Shared:
        """Return the arguments of layer `number` of the model."""
        own = self
        if self.per_layer is not None:
            own = replace(own, per_layer=jax.lax.dynamic_index_in_dim(self.per_layer, number, keepdims=False))
        if self.read is not None and self.every is not None:
            is_last = number == self.last
            keys = jnp.where(is_last, self.read.last_keys, self.every.last_keys)
            own = replace(own, read=Read(keys, jnp.where(is_last, self.read.rows, self.every.rows)))
        return own

    def after_layer(self, number: int | Array, hidden: Array | PendingResidual) -> Array | PendingResidual:
        """Return what leaves layer `number` of the model with what is added to it."""
        if self.added is None:
            return hidden
        own = jax.lax.dynamic_index_in_dim(self.added, jnp.minimum(number, len(self.added) - 1), keepdims=False)
        own = jnp.where(number < len(self.added), own, 0)
        if isinstance(hidden, PendingResidual):
            return PendingResidual(hidden.hidden, hidden.rest + own)
        return hidden + own

    @property
    def read_rows(self) -> LiveRows:
        """Return how many rows, the first ones, hold all of a layer's results that are read; None: all."""
        return self.live_rows if self.read is None else self.read.rows


@partial(jax.tree_util.register_dataclass, data_fields=("hidden", "rest"), meta_fields=())
@dataclass(frozen=True)
class PendingResidual:
    """Leaves the last addition of a layer to the next, which a TPU and a CPU then do together with its norm.

    A layer whose class has ``takes_pending_residual = True`` may be given one, and returns one instead of its hidden
    states.
    """

    hidden: Float[Array, "tokens embed"]
    rest: Float[Array, "tokens embed"]


def _total(hidden: Array | PendingResidual) -> Float[Array, "tokens embed"]:
    return hidden.hidden + hidden.rest if isinstance(hidden, PendingResidual) else hidden


@dataclass(frozen=True)
class Segment:
    """Describes layers ``start .. start + period * repeats``: a pattern of `period` layers, `repeats` times over."""

    start: int
    period: int
    repeats: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.repeats


def segments(kinds: Sequence[Hashable]) -> tuple[Segment, ...]:
    """Cut the layers into repeated patterns, each time taking the one that covers most, then the shortest.

    >>> segments("LLLL")
    (Segment(start=0, period=1, repeats=4),)
    >>> segments("LGLGL")
    (Segment(start=0, period=2, repeats=2), Segment(start=4, period=1, repeats=1))
    >>> [(s.period, s.repeats) for s in segments("LLLLLG" * 4 + "LL")]
    [(6, 4), (1, 2)]
    """
    found: list[Segment] = []
    start = 0
    while start < len(kinds):
        best = Segment(start, 1, 1)
        for period in range(1, (len(kinds) - start) // 2 + 1):
            repeats = 1
            pattern = kinds[start : start + period]
            while kinds[start + repeats * period : start + (repeats + 1) * period] == pattern:
                repeats += 1
            if repeats > 1 and period * repeats > best.stop - start:
                best = Segment(start, period, repeats)
        found.append(best)
        start = best.stop
    return tuple(found)


class StackState(NamedTuple):
    """Holds what one layer hands to the next.

    Attributes:
        within: the states that were tapped so far, a place for each tap and one more; None without taps.
    """

    hidden: Float[Array, "tokens embed"]
    within: Float[Array, "places tokens embed"] | None


MakeLayer: TypeAlias = Callable[[LayerKind, BuildContext], nnx.Module]
"""Builds one layer of a kind."""


def _loop(body: Callable[[Any, Array], tuple[Any, None]], carry: Any, first: Array, stop: Array) -> Any:
    """Return the carry after a scan's body ran for the numbers [`first`, `stop`), which are known on the device."""
    return jax.lax.fori_loop(first, stop, lambda number, carry: body(carry, number)[0], carry)


def _keepers(kinds: Sequence[LayerKind]) -> Counter[str | None]:
    """Return how many layers of each group keep KV."""
    return Counter(kind.group for kind in kinds if not kind.shares_kv)


class LayerStack(nnx.Module):
    """Calls layers in order as ``hidden, cache = layer(hidden, shared, cache, ref, attend)``.

    `shared` is the same for all layers, see `Shared`. `ref` is None for a layer without a group.

    Attributes:
        depth: number of layers that are called, the first ones; all of them unless `cut` says less.
        taps: see `tap`.
        instead: runs in the place of a call, with the stack and the call's arguments, see `models.vision.parts`;
            None = a call runs all layers.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        make: MakeLayer,
        build: BuildContext,
    ):
        """Build the layers: `make` builds one of a kind; a stack of them gets a leading axis on every parameter."""
        self.kinds = tuple(kinds)
        self.depth = len(self.kinds)
        self.taps: tuple[int, ...] = ()
        self.instead: Callable[..., tuple[Any, ...]] | None = None
        self.stacked = build.stacked
        self.unrolled = build.unrolled
        self.reads_rows = build.product_impl in ("tpu", "tpu_interpret")
        self.plan = segments(self.kinds) if build.stacked else (Segment(0, len(kinds), 1),)

        def made(kind: LayerKind, repeats: int) -> nnx.Module:
            if repeats == 1:
                return make(kind, build)
            stack = nnx.vmap(lambda rngs: make(kind, replace(build, rngs=rngs)), in_axes=0, out_axes=0)
            return nnx.split_rngs(splits=repeats)(stack)(build.rngs)

        self.segments = nnx.List(
            nnx.List(made(kind, s.repeats) for kind in self.kinds[s.start : s.start + s.period]) for s in self.plan
        )

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Any, cache: Any, attend: Attend
    ) -> tuple[Any, ...]:
        """Return what leaves the last layer and the cache; after `tap` also the states within, [tokens, states]."""
        if self.instead is not None:
            return self.instead(self, hidden, shared, cache, attend)
        if not self.taps:
            return self._run_all(hidden, shared, cache, attend)
        state = self.begun(hidden)
        hidden, (cache, within) = self._run_all(hidden, shared, (cache, state.within), attend)
        hidden, states = self.ended(StackState(hidden, within))
        return hidden, cache, states

    def begun(self, hidden: Float[Array, "tokens embed"]) -> StackState:
        """Return the state in front of the first layer, which `hidden` enters."""
        if not self.taps:
            return StackState(hidden, None)
        # A place for each tap, and one that all other layers write to. It is carried where the cache is.
        return StackState(hidden, jnp.zeros((len(self.taps) + 1, *hidden.shape), hidden.dtype))

    def ended(self, state: StackState) -> tuple[Array, ...]:
        """Return what leaves the last layer; after `tap` also the states within, [tokens, states]."""
        if state.within is None:
            return (state.hidden,)
        within = self._tapped(state.within, len(self.kinds), state.hidden)
        return state.hidden, jnp.concatenate(list(within[:-1]), axis=-1)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Return the layers of each round: of a pattern that is repeated, which `run_rounds` runs as a whole."""
        return tuple(segment.period for segment, _ in self._loops() for _ in range(segment.repeats))

    def run_rounds(
        self,
        state: StackState,
        shared: Any,
        cache: Any,
        attend: Attend,
        first: Int[Array, ""],
        stop: Int[Array, ""],
    ) -> tuple[StackState, Any]:
        """Return the state after rounds [`first`, `stop`) and the cache. One program runs any of them, and a state has
        the same bits wherever the rounds before it were cut."""
        hidden, carried, before = state.hidden, (cache, state.within) if self.taps else cache, 0
        for segment, layers in self._loops():
            own = tuple(jnp.clip(number - before, 0, segment.repeats) for number in (first, stop))
            hidden, carried = self._run(segment, layers, hidden, shared, carried, attend, (own[0], own[1]))
            before += segment.repeats
        cache, within = carried if self.taps else (carried, None)
        return StackState(hidden, within), cache

    def _tapped(self, within: Array, number: int | Array, hidden: Array | PendingResidual) -> Array:
        """Return `within` with what enters layer `number` in its place."""
        places = np.full(len(self.kinds) + 1, len(self.taps))
        places[list(self.taps)] = np.arange(len(self.taps))
        place = places[number] if isinstance(number, int) else jnp.asarray(places)[number]
        return jax.lax.dynamic_update_index_in_dim(within, _total(hidden), place, 0)

    def _run_all(self, hidden: Array, shared: Any, cache: Any, attend: Attend) -> tuple[Array, Any]:
        if self.unrolled and not self.stacked:
            layers = nnx.List(self.segments[0][: self.depth])
            return self._run(Segment(0, self.depth, 1), layers, hidden, shared, cache, attend)
        for segment, layers in self._loops():
            hidden, cache = self._run(segment, layers, hidden, shared, cache, attend)
        return hidden, cache

    def _loops(self) -> Iterator[tuple[Segment, nnx.List]]:
        """Yield the segments of the layers that are called, each with its layers as `_run` takes them."""
        if not self.stacked:
            for segment in segments(self.kinds[: self.depth]):
                yield segment, nnx.List(self.segments[0][segment.start : segment.stop])
            return
        for segment, layers in zip(self.plan, self.segments, strict=True):
            if segment.start < self.depth:
                repeats = min(segment.repeats, (self.depth - segment.start) // segment.period)
                yield replace(segment, repeats=repeats), layers

    def _run(
        self,
        segment: Segment,
        layers: nnx.List,
        hidden: Array,
        shared: Any,
        cache: Any,
        attend: Attend,
        rounds: tuple[Int[Array, ""], Int[Array, ""]] | None = None,
    ) -> tuple[Array, Any]:
        """Run a segment's `layers`: its stacks, one a place of its pattern, or all its layers.

        Args:
            rounds: the first repeat to run, and that after the last one; None = all.
        """
        before = _keepers(self.kinds[: segment.start])
        pattern = self.kinds[segment.start : segment.start + segment.period]
        a_repeat = _keepers(pattern)

        def repeat(layers: nnx.List, hidden: Array | PendingResidual, cache: Any, number: int | Array):
            for place, (kind, layer) in enumerate(zip(pattern, layers, strict=True)):
                kept = before[kind.group] + number * a_repeat[kind.group] + _keepers(pattern[:place])[kind.group]
                ref = None if kind.group is None else LayerRef(kind.group, kept - kind.shares_kv)
                which = segment.start + number * segment.period + place
                own = shared.of_layer(which)
                taken = hidden if getattr(layer, "takes_pending_residual", False) else _total(hidden)
                if self.taps:
                    pool, within = cache
                    within = self._tapped(within, which, hidden)
                    hidden, pool = layer(taken, own, pool, ref, attend)
                    cache = pool, within
                else:
                    hidden, cache = layer(taken, own, cache, ref, attend)
                hidden = shared.after_layer(which, hidden)
            return hidden, cache

        def carried(hidden: Array) -> Array | PendingResidual:
            takes_pending_residual = getattr(layers[-1], "takes_pending_residual", False)
            return PendingResidual(hidden, jnp.zeros_like(hidden)) if takes_pending_residual else hidden

        held = self.plan[self._find(segment.start)[0]].repeats if self.stacked else 1
        if segment.repeats == 1 and held == 1:
            if rounds is None:
                only, cache = repeat(layers, hidden, cache, 0)
                return _total(only), cache
            only_graph, only_params = nnx.split(layers)  # modules of one trace cannot be called in another

            def once(hidden: Array, cache: Any) -> tuple[Array, Any]:
                only, cache = repeat(nnx.merge(only_graph, only_params), hidden, cache, 0)
                return _total(only), cache

            return jax.lax.cond(rounds[0] < rounds[1], once, lambda *same: same, hidden, cache)
        numbers = jnp.arange(segment.repeats, dtype=jnp.int32)
        if not self.stacked:
            starts = range(0, len(layers), segment.period)
            apart = [nnx.split(nnx.List(layers[start : start + segment.period])) for start in starts]
            graph, each = apart[0][0], [params for _, params in apart]

            def banked(carry, number):
                params = choose(each, number)
                hidden, cache = carry
                return repeat(nnx.merge(graph, params), hidden, cache, number), None

            if rounds is None:
                (last, cache), _ = jax.lax.scan(banked, (carried(hidden), cache), numbers)
            else:
                last, cache = _loop(banked, (carried(hidden), cache), *rounds)
            return _total(last), cache
        kept = (LayerVector, LayerTable) if self.reads_rows else (nnx.Nothing(), nnx.Nothing())
        graph, *(vectors, tables, params) = nnx.split(layers, *kept, ...)
        vectors = jax.tree.map(lambda vector: vector[:, None], vectors)

        # A number that is carried costs a scalar's addition; one that is scanned over costs a slice, as much as any
        # operation on a TPU.
        def body(carry, params):
            hidden, cache, number = carry
            rows = jax.tree.map(lambda stack: StackedRow(stack, number), vectors)
            experts = jax.tree.map(lambda stack: StackedTable(stack, number), tables, is_leaf=is_held)
            hidden, cache = repeat(nnx.merge(graph, rows, experts, params), hidden, cache, number)
            return (hidden, cache, number + 1), None

        def body_of_some(carry, number):
            return body(carry, jax.tree.map(lambda x: x[number], params))

        carry = (carried(hidden), cache, jnp.int32(0))
        if rounds is not None:
            last, cache, _ = _loop(body_of_some, (*carry[:2], rounds[0]), *rounds)
        elif segment.repeats < held:  # scanning over a part of the stacks would copy it
            (last, cache, _), _ = jax.lax.scan(body_of_some, carry, numbers)
        else:
            (last, cache, _), _ = jax.lax.scan(body, carry, params, length=segment.repeats)
        return _total(last), cache

    def cut(self, depth: int) -> None:
        """Call only the first `depth` layers from now on.

        Raises:
            ValueError: there are no more than these, or they end within a pattern whose layers are stacked.
        """
        if depth >= len(self.kinds):
            raise ValueError(f"layers={depth} must be below the model's {len(self.kinds)}")
        for segment in self.plan if self.stacked else ():
            if segment.start < depth < segment.stop and (depth - segment.start) % segment.period:
                raise ValueError(f"layers={depth} ends within a pattern of {segment.period} layers, which are stacked")
        self.depth = depth

    def tap(self, layers: tuple[int, ...]) -> None:
        """See `jpaged.model_api.Tappable`.

        Raises:
            ValueError: there is no such layer, or one is named twice.
        """
        if not layers or len(set(layers)) < len(layers) or not all(0 <= at <= len(self.kinds) for at in layers):
            raise ValueError(f"layers={layers} are not distinct numbers from 0 to {len(self.kinds)}")
        self.taps = layers

    def layer(self, number: int) -> Any:
        """Return the module that holds layer `number`'s parameters, alone or stacked with its like."""
        segment, place, _ = self._find(number)
        return self.segments[segment][place]

    def locate(self, source: WeightSource, attribute: str) -> tuple[tuple[str | int, ...], int | None]:
        """Answer `CausalLM.locate` for a model that keeps this stack as `attribute`."""
        if source.layer is None:
            return source.path, None
        segment, place, repeat = self._find(source.layer)
        index = repeat if self.plan[segment].repeats > 1 else None
        return (attribute, "segments", segment, place, *source.path), index

    def _find(self, number: int) -> tuple[int, int, int]:
        """Return (segment, place in its pattern, repeat) of a layer."""
        which = next(i for i, s in enumerate(self.plan) if number < s.stop)
        repeat, place = divmod(number - self.plan[which].start, self.plan[which].period)
        return which, place, repeat

"""Keeps the matrices of the adapters that steps run with as products take them, from one step to the next.

In the pool an adapter lies in blocks, rank by rank (S-LoRA, 2023, section 5.1). Products want all layers of a site
together, and putting all adapters of a step in that order within each step took a processor longer than the step. So
there is a place for each adapter of a step; it is filled from the pool when another one comes, and is right until that
one's blocks are written again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jpaged.execution.batch import StepBatch
from jpaged.execution.caches.adapters import NO_PLACE, AdapterBatch, AdapterCache, Matrices
from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import PoolSpec, abstract_pool
from jpaged.execution.compile.program import Program
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.mesh import DATA_AXIS, Kind, each_replica, num_replicas, stack

Compile: TypeAlias = Callable[[], None]
_BEGIN, _FILL = "adapter places", "adapter placement"


class AdapterMatrices:
    """Holds the places of a step's adapters, on the devices; nothing where the pool keeps no adapters.

    Args:
        on_compile, on_compiled: called for the programs of places, for which requests wait, see `Program`.
        store: where these programs are loaded from, or collected for.
    """

    def __init__(
        self,
        spec: PoolSpec,
        mesh: Mesh,
        on_compile: Callable[[Hashable], None],
        on_compiled: Callable[[Hashable, float], None],
        store: ProgramStore | None = None,
    ) -> None:
        self._spec = spec
        self._mesh = mesh
        self._at = _place(spec)
        self._matrices: Matrices | None = None
        # By replica and place: the blocks of the adapter in it.
        self._held: dict[tuple[int, int], Int[np.ndarray, " blocks"]] = {}
        if self._at is not None:
            callbacks, begin, fill = (on_compile, on_compiled), make_begin(spec, mesh), make_fill(spec, mesh, self._at)
            self._begin = Program(begin, *callbacks, (_BEGIN, spec, mesh), kind=_BEGIN, store=store)
            self._fill = Program(fill, *callbacks, (_FILL, spec, mesh), kind=_FILL, store=store)

    def given(self, pool: Pool, batch: StepBatch) -> StepBatch:
        """Return a step's arrays with the matrices of its adapters for their blocks; the pool is only read.

        What is returned is for the next call of a step: the matrices are donated to the program that changes them.
        """
        if self._at is None or (arrays := batch.caches[self._at]).table is None:
            return batch
        tables = arrays.table.reshape(-1, *arrays.table.shape[-2:])
        for place in range(tables.shape[1]):
            blocks = {r: mine for r, mine in enumerate(tables[:, place]) if self._lacks(r, place, mine)}
            if blocks:
                self._put(pool, place, blocks, tables[:, place])
        return _with_matrices(batch, self._at, self._there())

    def _lacks(self, replica: int, place: int, blocks: Int[np.ndarray, " blocks"]) -> bool:
        held = self._held.get((replica, place))
        return bool((blocks >= 0).any()) and (held is None or not np.array_equal(held, blocks))

    def _put(
        self,
        pool: Pool,
        place: int,
        new: dict[int, Int[np.ndarray, " blocks"]],
        tables: Int[np.ndarray, "replicas blocks"],
    ) -> None:
        # Whatever comes in between leaves no place that seems to hold what it does not.
        matrices, self._matrices = self._there(), None
        held, self._held = self._held, {}
        places = [np.int32(place if replica in new else NO_PLACE) for replica in range(len(tables))]
        each = stack(self._mesh, list(zip(tables, places, strict=True)))
        self._matrices = self._fill((_FILL,), matrices, pool, *each)
        self._held = {**held, **{(replica, place): blocks.copy() for replica, blocks in new.items()}}

    def _there(self) -> Matrices:
        """Return the matrices, which begin as zeros."""
        if self._matrices is None:
            self._matrices = self._begin((_BEGIN,))
        return self._matrices

    def shapes(self) -> Iterator[tuple[str, Callable[[], Compile]]]:
        """Yield the name of each program and a call that traces it and returns a call that compiles it, in any
        thread."""
        if self._at is None:
            return
        cache = self._spec.caches[self._at]
        assert isinstance(cache, AdapterCache)
        blocks = np.zeros(sum(cache.most_blocks), np.int32)
        like, pool = abstract_matrices(self._spec, self._mesh), abstract_pool(self._spec, self._mesh)
        yield _BEGIN, partial(self._begin.prepare, (_BEGIN,))
        each = stack(self._mesh, [(blocks, np.int32(0))] * num_replicas(self._mesh))
        yield _FILL, partial(self._fill.prepare, (_FILL,), like, pool, *each)

    def written(self, each: Sequence[Sequence[int]]) -> None:
        """Note that blocks of adapters were written, of each replica, so copies read from them before are stale."""
        self._held = {at: old for at, old in self._held.items() if not np.isin(old, each[at[0]]).any()}

    def release(self) -> None:
        """Give back the memory; the next step with adapters begins anew."""
        for leaf in jax.tree.leaves(self._matrices):
            leaf.delete()
        self._matrices, self._held = None, {}

    def close(self) -> None:
        """Free the memory and the compiled programs."""
        self.release()
        if self._at is not None:
            self._begin.forget()
            self._fill.forget()


def make_begin(spec: PoolSpec, mesh: Mesh) -> jax.stages.Wrapped:
    """Return ``begin() -> matrices``, zeros."""
    like = abstract_matrices(spec, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), out_shardings=shardings)


def make_fill(spec: PoolSpec, mesh: Mesh, at: int) -> jax.stages.Wrapped:
    """Return ``fill(matrices, pool, blocks, place) -> matrices``, which puts the adapter that lies in these blocks into
    a place, or nothing where it is `NO_PLACE`; the matrices are donated."""
    cache, view = spec.caches[at], spec.views[spec.slices[at]][0]
    assert isinstance(cache, AdapterCache)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_matrices(spec, mesh))

    def fill(matrices: Matrices, pool: Pool, blocks: Int[Array, " blocks"], place: Int[Array, ""]) -> Matrices:
        return cache.filled(mesh, view, matrices, pool, blocks, place)

    takes: tuple[Kind, ...] = ("own", "split", "own", "own")
    return jax.jit(each_replica(fill, mesh, takes, "own"), donate_argnums=0, out_shardings=shardings)


def with_abstract_matrices(batch: StepBatch, spec: PoolSpec, mesh: Mesh) -> StepBatch:
    """Return a step's arrays as `AdapterMatrices.given` gives them, with shapes for the matrices."""
    at = _place(spec)
    if at is None or batch.caches[at].table is None:
        return batch
    return _with_matrices(batch, at, abstract_matrices(spec, mesh))


def abstract_matrices(spec: PoolSpec, mesh: Mesh) -> Any:
    """Return shapes and shardings of all replicas' matrices, which the devices hold besides the pool once an adapter is
    used; an empty tree where the pool keeps no adapters."""
    at = _place(spec)
    if at is None:
        return ()
    cache = spec.caches[at]
    assert isinstance(cache, AdapterCache)
    of_one = cache.matrices(mesh)
    if DATA_AXIS not in mesh.shape:
        return of_one

    def of_all(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(DATA_AXIS, *leaf.sharding.spec)
        shape = (num_replicas(mesh), *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(of_all, of_one)


def _place(spec: PoolSpec) -> int | None:
    """Return which of the pool's caches keeps adapters."""
    return next((i for i, cache in enumerate(spec.caches) if isinstance(cache, AdapterCache)), None)


def _with_matrices(batch: StepBatch, at: int, matrices: Matrices) -> StepBatch:
    caches: Sequence[Any] = batch.caches
    own: AdapterBatch = caches[at]
    return batch._replace(caches=(*caches[:at], own._replace(table=None, matrices=matrices), *caches[at + 1 :]))

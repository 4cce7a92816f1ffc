"""Copies whole blocks of the pool into arrays and back, each replica its own. Each shard moves its own share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, Shaped, UInt8

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import PoolSpec, abstract_pool
from jpaged.execution.compile.program import Program
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.mesh import DATA_AXIS, num_replicas, pool_sharding
from jpaged.memory.policies import Adapters

BlockBytes: TypeAlias = UInt8[np.ndarray, "shards blocks bytes"]
Batch: TypeAlias = Shaped[Array | np.ndarray, "shards blocks ..."]
"""The blocks of a launch: the shards of all replicas, one replica's after another's."""
Ids: TypeAlias = Int[np.ndarray, "replicas blocks"]
Compile: TypeAlias = Callable[[], None]

SIZES = (64, 16, 4, 1)
"""Blocks of one launch, of each replica. A number of blocks is split into these, so that the replica that moves most
holds no padding."""

LAUNCH_BYTES = 512 << 20
"""Most bytes of a launch of several blocks, which the device holds besides its pool: a block of states can be large."""


class BlockMover:
    """Has the programs that gather blocks of each group, and those that scatter them, for launches of some sizes.

    Args:
        on_compile, on_compiled: called for every shape that is compiled, see `Program`. Where nothing moves during
            steps, only the program that writes adapters counts: no request waits for the others.
        store: where programs are loaded from, or collected for; None = neither.
        moves: whether steps move blocks of sequences.

    Attributes:
        adapters: number of the group that keeps low-rank adapters; None = none does.
        sizes: the numbers of blocks that a launch of each group may have, largest first.
    """

    def __init__(
        self,
        spec: PoolSpec,
        mesh: Mesh,
        on_compile: Callable[[Hashable], None],
        on_compiled: Callable[[Hashable, float], None],
        *,
        store: ProgramStore | None = None,
        moves: bool = True,
    ) -> None:
        self.spec = spec
        self.mesh = mesh
        self.num_replicas = num_replicas(mesh)
        self.sizes = [launch_sizes(layout.block_bytes) for layout in spec.layout.groups]
        policies = (layout.spec.policy for layout in spec.layout.groups)
        self.adapters = next((g for g, policy in enumerate(policies) if isinstance(policy, Adapters)), None)

        def program(make: Callable[..., jax.stages.Wrapped], name: str, group: int, counts: bool) -> Program:
            return Program(
                make(spec, mesh, group),
                (lambda size: on_compile((name, group, size))) if counts else (lambda size: None),
                (lambda size, seconds: on_compiled((name, group, size), seconds)) if counts else _quiet,
                (name, spec, mesh, group),
                kind=f"{name} {group}",
                store=store if counts else None,
            )

        groups = range(len(spec.views))
        self._gather = [program(make_gather, "swap out", group, moves) for group in groups]
        self._scatter = [program(make_scatter, "swap in", group, moves or group == self.adapters) for group in groups]

    def gather(self, pool: Pool, group: int, each: Sequence[Iterable[int]], size: int) -> jax.Array:
        """Start copying blocks of a group out of the pool, at most `size` of each replica; nothing is waited for.

        Raises:
            RuntimeError: a block is out of range (JAX would clamp it silently).
        """
        batch: jax.Array = self._gather[group](size, pool, self._ids(group, each, size, padding=0))
        return batch

    def scatter(self, pool: Pool, group: int, batch: Batch, each: Sequence[Iterable[int]]) -> Pool:
        """Write a launch to blocks of a group of the pool, which is donated, and return it.

        Args:
            each: a block for each of the launch's, or for the first of them; those of `nowhere` are not written.

        Raises:
            RuntimeError: a block is out of range (JAX would drop it silently).
        """
        size = batch.shape[1]
        ids = self._ids(group, each, size, padding=self.nowhere(group), most=self.nowhere(group))
        return self._scatter[group](size, pool, jax.device_put(batch, pool_sharding(self.mesh)), ids)

    def nowhere(self, group: int) -> int:
        """Return the id of a block that is not written."""
        return self.spec.views[group][0]

    def check(self, group: int, blocks: Iterable[int]) -> None:
        """Raise RuntimeError where a block is not one of the group's."""
        self._check(group, list(blocks), self.nowhere(group) - 1)

    def write(
        self, pool: Pool, group: int, each: Sequence[Sequence[int]], contents: Sequence[BlockBytes], size: int
    ) -> Pool:
        """Write the bytes of at most `size` blocks of each replica into the pool, which is donated, and return it."""
        for blocks in each:
            self.check(group, blocks)
        return self.scatter(pool, group, self.batch(group, contents, size), each)

    def batch(self, group: int, contents: Sequence[BlockBytes], size: int) -> Shaped[np.ndarray, "shards blocks ..."]:
        """Return the bytes of some blocks of each replica as a launch has them, padded to `size`."""
        shards, num_bytes = self.spec.shards, self.spec.layout.groups[group].block_bytes
        rows = np.zeros((self.num_replicas * shards, size, num_bytes), np.uint8)
        for replica, mine in enumerate(contents):
            rows[replica * shards : (replica + 1) * shards, : mine.shape[1]] = mine
        return rows.view(self.spec.dtype).reshape(*rows.shape[:2], *self.spec.views[group][1:])

    def launches(self, group: int, number: int) -> Iterator[tuple[int, int]]:
        """Yield the first block and the size of each launch that moves so many blocks without padding, the largest
        first."""
        start = 0
        for size in self.sizes[group]:
            while number - start >= size:
                yield start, size
                start += size

    def shapes(self) -> Iterator[tuple[str, Callable[[], Compile]]]:
        """Yield every shape of a launch of blocks that sequences may have: its name, and a call that traces it and
        returns a call that compiles it."""
        for group, layout in enumerate(self.spec.layout.groups):
            for size in self.sizes[group] if group != self.adapters else ():
                name = f"x{size}, {layout.spec.name}"
                yield f"swap out {name}", partial(self.prepare_gather, group, size)
                yield f"swap in {name}", partial(self.prepare_scatter, group, size)

    def prepare_gather(self, group: int, size: int) -> Compile:
        """Trace the program of `gather` for a size; return a call that compiles it, in any thread."""
        ids = np.zeros((self.num_replicas, size), np.int32)
        return self._gather[group].prepare(size, abstract_pool(self.spec, self.mesh), ids)

    def prepare_scatter(self, group: int, size: int) -> Compile:
        """Trace the program of `scatter` for a size; return a call that compiles it, in any thread."""
        shape = (self.num_replicas * self.spec.shards, size, *self.spec.views[group][1:])
        batch = jax.ShapeDtypeStruct(shape, self.spec.dtype, sharding=pool_sharding(self.mesh))
        ids = np.zeros((self.num_replicas, size), np.int32)
        return self._scatter[group].prepare(size, abstract_pool(self.spec, self.mesh), batch, ids)

    def close(self) -> None:
        """Release all compiled programs."""
        for program in (*self._gather, *self._scatter):
            program.forget()

    def _ids(self, group: int, each: Sequence[Iterable[int]], size: int, padding: int, most: int | None = None) -> Ids:
        ids = np.full((self.num_replicas, size), padding, np.int32)
        for row, blocks in zip(ids, each, strict=True):
            mine = list(blocks)
            self._check(group, mine, self.nowhere(group) - 1 if most is None else most)
            row[: len(mine)] = mine
        return ids

    def _check(self, group: int, blocks: list[int], most: int) -> None:
        if any(not 0 <= block <= most for block in blocks):
            limit = self.nowhere(group)
            raise RuntimeError(f"blocks {min(blocks)}..{max(blocks)} of group {group} are outside [0, {limit})")


def _quiet(size: Hashable, seconds: float) -> None:
    """Count nothing."""


def block_bytes(batch: Shaped[np.ndarray, "shards blocks ..."]) -> BlockBytes:
    """Return the bytes of each shard's part of each block."""
    return np.ascontiguousarray(batch).view(np.uint8).reshape(*batch.shape[:2], -1)


def launch_sizes(block_bytes: int) -> tuple[int, ...]:
    """Return the numbers of blocks that a launch may have, largest first, for blocks of `block_bytes` bytes."""
    return tuple(size for size in SIZES if size == 1 or size * block_bytes <= LAUNCH_BYTES)


def make_gather(spec: PoolSpec, mesh: Mesh, group: int) -> jax.stages.Wrapped:
    """Return ``gather(pool, ids) -> batch``, which copies some blocks of a group, of each replica its own."""

    def on_shard(pool: Pool, ids: Int[Array, "1 blocks"]) -> Batch:
        return pool.reshape(spec.views[group])[ids[0]][None]

    split = pool_sharding(mesh).spec
    return jax.jit(
        jax.shard_map(on_shard, mesh=mesh, in_specs=(split, _ids_spec(mesh)), out_specs=split, check_vma=False)
    )


def make_scatter(spec: PoolSpec, mesh: Mesh, group: int) -> jax.stages.Wrapped:
    """Return ``scatter(pool, batch, ids) -> pool``; the pool is donated. Ids out of range are dropped."""

    def on_shard(pool: Pool, batch: Batch, ids: Int[Array, "1 blocks"]) -> Pool:
        blocks = pool.reshape(spec.views[group])
        if batch.shape[1] == 1:  # XLA:CPU would turn a scatter of one block into a select over the pool
            here = lax.dynamic_slice_in_dim(blocks, ids[0, 0], 1, axis=0)  # out of range it is the last block
            block = jnp.where(ids[0, 0] < blocks.shape[0], batch[0], here)
            written = lax.dynamic_update_slice_in_dim(blocks, block, ids[0, 0], axis=0)
        else:
            written = blocks.at[ids[0]].set(batch[0], mode="drop")
        return written.reshape(pool.shape)

    split = pool_sharding(mesh).spec
    everywhere = jax.shard_map(
        on_shard, mesh=mesh, in_specs=(split, split, _ids_spec(mesh)), out_specs=split, check_vma=False
    )
    return jax.jit(everywhere, donate_argnums=0)


def _ids_spec(mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(DATA_AXIS) if DATA_AXIS in mesh.shape else PartitionSpec()

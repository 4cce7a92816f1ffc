"""Copies the content of chosen blocks between devices and host, as bytes: the blocks of a saved state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, Shaped

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import PoolSpec, abstract_pool
from jpaged.execution.compile.program import Program
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.mesh import DATA_AXIS, num_replicas, pool_sharding
from jpaged.execution.transfer.host_store import LAUNCH_BYTES, BlockBytes, block_bytes, launch_sizes
from jpaged.memory.policies import Adapters

Launch: TypeAlias = Shaped[Array | np.ndarray, "shards blocks ..."]
Blocks: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""Block ids by replica and group."""


class BlockCopies:
    """Holds blocks that were copied out of the pool, and brings them to the host, in any thread.

    Args:
        launches: for each group its launches, with the number of blocks in each, padding left out.
    """

    def __init__(self, spec: PoolSpec, blocks: Blocks, launches: list[list[Launch]]) -> None:
        self._spec = spec
        self._blocks = blocks
        self._launches = launches

    def arrays(self) -> list[list[BlockBytes]]:
        """Return the bytes of each replica's blocks of each group, in the order of the request. Call it once only: it
        releases the copies."""
        shards = self._spec.shards
        found = [[] for _ in self._blocks]  # type: list[list[BlockBytes]]
        for group in range(len(self._spec.views)):
            parts = []
            while self._launches[group]:
                parts.append(block_bytes(np.asarray(self._launches[group].pop(0))))
            for replica, groups in enumerate(self._blocks):
                mine, count = slice(replica * shards, (replica + 1) * shards), len(groups[group])
                if parts:
                    found[replica].append(np.concatenate([part[mine] for part in parts], axis=1)[:, :count])
                else:
                    size = self._spec.layout.groups[group].block_bytes
                    found[replica].append(np.zeros((shards, 0, size), np.uint8))
        return found


class PoolBlocks:
    """Reads and writes blocks of every group, in launches of one size a group: one program each way.

    Args:
        mesh: the pool's devices, all of this process.
        on_compile, on_compiled: called for the program that writes adapters, see `Program`: requests wait for it.
        store: where that program is loaded from, or collected for.

    Attributes:
        adapters: number of the group that keeps low-rank adapters; None = none does.
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
        self._sizes = [launch_sizes(plan.block_bytes)[0] for plan in spec.layout.groups]
        groups = range(len(spec.views))
        self._gather = [Program(_make_gather(spec, mesh, group), lambda _: None) for group in groups]
        self._scatter = [Program(_make_scatter(spec, mesh, group), lambda _: None) for group in groups]
        policies = (plan.spec.policy for plan in spec.layout.groups)
        self.adapters = next((g for g, policy in enumerate(policies) if isinstance(policy, Adapters)), None)
        if self.adapters is not None:
            made_of, load = ("adapter load", spec, mesh), _make_scatter(spec, mesh, self.adapters)
            self._scatter[self.adapters] = Program(
                load, on_compile, on_compiled, made_of, kind="adapter load", store=store
            )

    def prepare(self) -> None:
        """Compile the programs of `read`, in any thread: it takes seconds, and no engine should wait for it."""
        pool = abstract_pool(self._spec, self._mesh)
        for program, size in zip(self._gather, self._sizes, strict=True):
            program.prepare(size, pool, np.zeros((num_replicas(self._mesh), size), np.int32))()

    def prepare_adapters(self) -> Callable[[], None]:
        """Trace the programs of `write` for adapters; return a call that compiles them, in any thread."""
        group = self.adapters
        assert group is not None, "an engine without adapters was asked to write some"
        size, replicas = self._sizes[group], num_replicas(self._mesh)
        shape = (replicas * self._spec.shards, size, *self._spec.views[group][1:])
        blocks = jax.ShapeDtypeStruct(shape, self._spec.dtype, sharding=pool_sharding(self._mesh))
        ids, pool = np.zeros((replicas, size), np.int32), abstract_pool(self._spec, self._mesh)
        return self._scatter[group].prepare(_write_key(group, size), pool, blocks, ids)

    def close(self) -> None:
        """Release all compiled programs."""
        for program in (*self._gather, *self._scatter):
            program.forget()

    def read(self, pool: Pool, blocks: Blocks) -> BlockCopies:
        """Copy blocks out of the pool; when this returns, the pool may be written again.

        Devices hold about `LAUNCH_BYTES` of copies at most, or a launch of each group; these go on to the host
        afterwards.
        """
        launches: list[list[Launch]] = [[] for _ in self._spec.views]
        for group, size in enumerate(self._sizes):
            mine, moved = launches[group], 0
            most = max(1, LAUNCH_BYTES // (size * self._spec.layout.groups[group].block_bytes * len(launches)))
            for _, ids in self._launch_ids(group, blocks, padding=0):
                if len(mine) - moved >= most:
                    mine[moved] = np.asarray(mine[moved])
                    moved += 1
                launch: jax.Array = self._gather[group](size, pool, ids)
                launch.copy_to_host_async()
                mine.append(launch)
        jax.block_until_ready(launches)
        return BlockCopies(self._spec, blocks, launches)

    def write(self, pool: Pool, blocks: Blocks, contents: Sequence[Sequence[BlockBytes]]) -> Pool:
        """Write blocks into the pool, which is donated, and return it.

        Args:
            contents: what `BlockCopies.arrays` gave, for each replica and group; its order is that of `blocks`.
        """
        shards = self._spec.shards
        for group, size in enumerate(self._sizes):
            shape, nowhere = self._spec.views[group][1:], self._spec.views[group][0]
            for start, ids in self._launch_ids(group, blocks, padding=nowhere):
                batch = np.zeros((len(blocks) * shards, size, self._spec.layout.groups[group].block_bytes), np.uint8)
                for replica, groups in enumerate(contents):
                    part = groups[group][:, start : start + size]
                    batch[replica * shards : (replica + 1) * shards, : part.shape[1]] = part
                typed = batch.view(self._spec.dtype).reshape(*batch.shape[:2], *shape)
                there = jax.device_put(typed, pool_sharding(self._mesh))
                pool = self._scatter[group](_write_key(group, size), pool, there, ids)
        return pool

    def _launch_ids(
        self, group: int, blocks: Blocks, padding: int
    ) -> Iterator[tuple[int, Int[np.ndarray, "replicas blocks"]]]:
        """Yield, for each launch, the place of its first block and the padded ids of every replica."""
        size, limit = self._sizes[group], self._spec.views[group][0]
        for start in range(0, max(len(groups[group]) for groups in blocks), size):
            ids = np.full((len(blocks), size), padding, np.int32)
            for row, groups in zip(ids, blocks, strict=True):
                mine = groups[group][start : start + size]
                if any(not 0 <= block < limit for block in mine):
                    raise RuntimeError(f"blocks {min(mine)}..{max(mine)} of group {group} are outside [0, {limit})")
                row[: len(mine)] = mine
            yield start, ids


def _write_key(group: int, size: int) -> Hashable:
    return "write blocks", group, size


def _ids_spec(mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(DATA_AXIS) if DATA_AXIS in mesh.shape else PartitionSpec()


def _make_gather(spec: PoolSpec, mesh: Mesh, group: int) -> jax.stages.Wrapped:
    """Return ``gather(pool, ids) -> launch``, which copies some blocks of a group, of each replica its own."""

    def on_shard(pool: Pool, ids: Int[Array, "1 blocks"]) -> Launch:
        return pool.reshape(spec.views[group])[ids[0]][None]

    split = pool_sharding(mesh).spec
    return jax.jit(
        jax.shard_map(on_shard, mesh=mesh, in_specs=(split, _ids_spec(mesh)), out_specs=split, check_vma=False)
    )


def _make_scatter(spec: PoolSpec, mesh: Mesh, group: int) -> jax.stages.Wrapped:
    """Return ``scatter(pool, launch, ids) -> pool``; the pool is donated. Ids out of range are dropped."""

    def on_shard(pool: Pool, launch: Launch, ids: Int[Array, "1 blocks"]) -> Pool:
        blocks = pool.reshape(spec.views[group])
        if launch.shape[1] == 1:  # XLA:CPU would turn a scatter of one block into a select over the pool
            here = jax.lax.dynamic_slice_in_dim(blocks, ids[0, 0], 1, axis=0)  # out of range it is the last block
            block = jax.numpy.where(ids[0, 0] < blocks.shape[0], launch[0], here)
            written = jax.lax.dynamic_update_slice_in_dim(blocks, block, ids[0, 0], axis=0)
        else:
            written = blocks.at[ids[0]].set(launch[0], mode="drop")
        return written.reshape(pool.shape)

    split = pool_sharding(mesh).spec
    everywhere = jax.shard_map(
        on_shard, mesh=mesh, in_specs=(split, split, _ids_spec(mesh)), out_specs=split, check_vma=False
    )
    return jax.jit(everywhere, donate_argnums=0)

"""Moves whole blocks to host memory and back (PagedAttention, section 4.5). Each shard moves its own share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, Shaped, UInt8

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.compile.program import Program
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.mesh import sharding
from jpaged.memory.copies import HostBlock, SwapCopy
from jpaged.model_api import TENSOR_AXIS

BlockBytes: TypeAlias = UInt8[np.ndarray, "shards blocks bytes"]
Batch: TypeAlias = Shaped[Array | np.ndarray, "shards blocks ..."]

SIZES = (64, 16, 4, 1)
"""Blocks of one launch. A number of blocks is split into these, so that host memory holds no padding."""

LAUNCH_BYTES = 512 << 20
"""Most bytes of a launch of several blocks, which the device holds besides its pool: a block of states can be large."""

PINNED = "pinned_host"


class HostStore:
    """Keeps the content of swapped blocks, in pinned memory where the devices can address it.

    A launch's blocks stay together in one array, which is freed when none of them is needed any more.

    Args:
        on_compile, on_compiled: called for every shape that is compiled, see `Program`.
        store: where programs are loaded from, or collected for; None = neither.
    """

    def __init__(
        self,
        spec: PoolSpec,
        mesh: Mesh,
        on_compile: Callable[[Hashable], None],
        on_compiled: Callable[[Hashable, float], None] = lambda shape, seconds: None,
        *,
        store: ProgramStore | None = None,
    ) -> None:
        self._spec = spec
        self._on_device = sharding(mesh, TENSOR_AXIS)
        kinds = {memory.kind for memory in mesh.local_devices[0].addressable_memories()}
        self._pinned = self._on_device.with_memory_kind(PINNED) if PINNED in kinds else None

        def programs(make: Callable[..., jax.stages.Wrapped], name: str) -> list[Program]:
            def one(group: int) -> Program:
                return Program(
                    make(spec, mesh, group),
                    lambda size: on_compile((name, group, size)),
                    lambda size, seconds: on_compiled((name, group, size), seconds),
                    kind=f"{name} {group}",
                    store=store,
                )

            return [one(group) for group in range(len(spec.views))]

        self._gather = programs(make_gather, "swap out")
        self._scatter = programs(make_scatter, "swap in")
        self._sizes = [launch_sizes(plan.block_bytes) for plan in spec.layout.groups]
        self._place: dict[HostBlock, tuple[Batch, int]] = {}

    def __len__(self) -> int:
        """Return how many blocks are held."""
        return len(self._place)

    def forget(self, dropped: Iterable[HostBlock]) -> None:
        """Release blocks that will not be swapped in."""
        for block in dropped:
            del self._place[block]

    def close(self) -> None:
        """Release all blocks and all compiled programs."""
        self.forget_all()
        for program in (*self._gather, *self._scatter):
            program.forget()

    def forget_all(self) -> None:
        """Release all blocks."""
        self._place.clear()

    def swap_out(self, pool: Pool, moves: Sequence[SwapCopy]) -> None:
        """Start copying blocks to the host.

        Raises:
            RuntimeError: a device block is out of range (JAX would clamp it silently).
        """
        for group, mine in _by_group(moves).items():
            for some in _launches(mine, self._sizes[group]):
                batch = self._read(pool, group, self._ids(group, some))
                for row, move in enumerate(some):
                    self._place[HostBlock(group, move.host_block)] = batch, row

    def swap_in(self, pool: Pool, moves: Sequence[SwapCopy]) -> Pool:
        """Copy blocks back into the pool, which is donated, and return it; the host then forgets them.

        Raises:
            RuntimeError: a device block is out of range (JAX would drop it silently).
        """
        for group, mine in _by_group(moves).items():
            self._ids(group, mine)
            batches: dict[int, Batch] = {}
            targets: dict[int, dict[int, int]] = defaultdict(dict)
            for move in mine:
                batch, row = self._place.pop(HostBlock(group, move.host_block))
                batches[id(batch)] = batch
                targets[id(batch)][row] = move.device_block
            nowhere = self._spec.views[group][0]
            for key, batch in batches.items():
                rows = [targets[key].get(row, nowhere) for row in range(batch.shape[1])]
                pool = self._write(pool, group, batch, np.array(rows, np.int32))
        return pool

    def copied_out(self, pool: Pool, group: int, blocks: Sequence[int]) -> Iterator[tuple[jax.Array, int]]:
        """Start copying blocks out of the pool; yield each launch and how many of the blocks, in their order, it has.
        Nothing is waited for, and nothing is kept here.

        Raises:
            RuntimeError: a block is out of range (JAX would clamp it silently).
        """
        moves = [SwapCopy(group, block, -1) for block in blocks]
        for some in _launches(moves, self._sizes[group]):
            batch: jax.Array = self._gather[group](len(some), pool, self._ids(group, some))
            yield batch if self._pinned is None else jax.device_put(batch, self._pinned), len(some)

    def fill(self, pool: Pool, group: int, blocks: Sequence[int], contents: Sequence[np.ndarray]) -> Pool:
        """Write blocks of a group into the pool, which is donated, and return it.

        Args:
            contents: for each block the bytes of all shards, one after another.

        Raises:
            RuntimeError: a block is out of range (JAX would drop it silently).
        """
        moves = [SwapCopy(group, block, place) for place, block in enumerate(blocks)]
        self._ids(group, moves)
        for some in _launches(moves, self._sizes[group]):
            rows = [contents[move.host_block].reshape(self._spec.shards, -1) for move in some]
            batch = self._batch(group, np.stack(rows, axis=1))
            pool = self._write(pool, group, batch, self._ids(group, some))
        return pool

    def _batch(self, group: int, rows: BlockBytes) -> Shaped[np.ndarray, "shards blocks ..."]:
        """Return the bytes of some blocks as a launch has them."""
        mine = np.ascontiguousarray(rows)
        return mine.view(self._spec.dtype).reshape(*mine.shape[:2], *self._spec.views[group][1:])

    def shapes(self, pool: jax.ShapeDtypeStruct) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
        """Yield every shape of a launch: its name, and what traces it and returns what compiles it. Those into the pool
        come after those out of it, which give the shape of what is moved."""
        for group, plan in enumerate(self._spec.layout.groups):
            for size in self._sizes[group]:
                name, ids = f"x{size}, {plan.spec.name}", np.zeros(size, np.int32)
                yield f"swap out {name}", partial(self._gather[group].prepare, size, pool, ids)
                yield f"swap in {name}", partial(self._prepare_scatter, group, size, pool, ids)

    def _prepare_scatter(
        self, group: int, size: int, pool: jax.ShapeDtypeStruct, ids: np.ndarray
    ) -> Callable[[], None]:
        batch = self._gather[group].out_info
        shape = (batch.shape[0], size, *batch.shape[2:])  # as last traced, perhaps by another thread
        blocks = jax.ShapeDtypeStruct(shape, batch.dtype, sharding=self._on_device)
        return self._scatter[group].prepare(size, pool, blocks, ids)

    @property
    def num_shapes(self) -> int:
        """Return how many shapes `shapes` yields."""
        return 2 * sum(map(len, self._sizes))

    def contents(self, blocks: Sequence[Sequence[int]]) -> list[BlockBytes]:
        """Return the bytes of some blocks of each group, in the order of `blocks`."""
        read: dict[int, np.ndarray] = {}
        found = []
        for group, plan in enumerate(self._spec.layout.groups):
            rows = np.empty((self._spec.shards, len(blocks[group]), plan.block_bytes), np.uint8)
            for place, block in enumerate(blocks[group]):
                batch, row = self._place[HostBlock(group, block)]
                if id(batch) not in read:
                    read[id(batch)] = block_bytes(np.asarray(batch))
                rows[:, place] = read[id(batch)][:, row]
            found.append(rows)
        return found

    def put(self, blocks: Sequence[Sequence[int]], contents: Sequence[BlockBytes]) -> None:
        """Hold the bytes of blocks of each group that another store had; none of them is here yet."""
        for group, (ids, rows) in enumerate(zip(blocks, contents, strict=True)):
            moves = [SwapCopy(group, place, block) for place, block in enumerate(ids)]
            for some in _launches(moves, self._sizes[group]):
                batch = self._batch(group, rows[:, [move.device_block for move in some]])
                there = batch if self._pinned is None else jax.device_put(batch, self._pinned)
                for row, move in enumerate(some):
                    self._place[HostBlock(group, move.host_block)] = there, row

    def _read(self, pool: Pool, group: int, ids: np.ndarray) -> Batch:
        batch = self._gather[group](len(ids), pool, ids)
        return jax.device_get(batch) if self._pinned is None else jax.device_put(batch, self._pinned)

    def _write(self, pool: Pool, group: int, batch: Batch, ids: np.ndarray) -> Pool:
        return self._scatter[group](len(ids), pool, jax.device_put(batch, self._on_device), ids)

    def _ids(self, group: int, moves: Sequence[SwapCopy]) -> np.ndarray:
        limit = self._spec.views[group][0]
        for move in moves:
            if not 0 <= move.device_block < limit:
                raise RuntimeError(f"device_block={move.device_block} of {move} is outside [0, {limit})")
        return np.array([move.device_block for move in moves], np.int32)


def block_bytes(batch: Shaped[np.ndarray, "shards blocks ..."]) -> BlockBytes:
    """Return the bytes of each shard's part of each block."""
    return np.ascontiguousarray(batch).view(np.uint8).reshape(*batch.shape[:2], -1)


def _by_group(moves: Sequence[SwapCopy]) -> dict[int, list[SwapCopy]]:
    groups: dict[int, list[SwapCopy]] = defaultdict(list)
    for move in moves:
        groups[move.group].append(move)
    return groups


def launch_sizes(block_bytes: int) -> tuple[int, ...]:
    """Return the numbers of blocks that a launch may have, largest first, for blocks of `block_bytes` bytes."""
    return tuple(size for size in SIZES if size == 1 or size * block_bytes <= LAUNCH_BYTES)


def _launches(moves: list[SwapCopy], sizes: Sequence[int]) -> Iterator[list[SwapCopy]]:
    """Yield runs of `moves` of the launches' `sizes`, the largest first."""
    start = 0
    for size in sizes:
        while len(moves) - start >= size:
            yield moves[start : start + size]
            start += size


def make_gather(spec: PoolSpec, mesh: Mesh, group: int) -> jax.stages.Wrapped:
    """Return ``gather(pool, ids) -> batch``, which copies some blocks of a group."""

    def on_shard(pool: Pool, ids: Int[Array, " blocks"]) -> Batch:
        return pool.reshape(spec.views[group])[ids][None]

    return jax.jit(_sharded(on_shard, mesh, (PartitionSpec(TENSOR_AXIS), PartitionSpec())))


def make_scatter(spec: PoolSpec, mesh: Mesh, group: int) -> jax.stages.Wrapped:
    """Return ``scatter(pool, batch, ids) -> pool``; the pool is donated. Out-of-range ids are dropped, except a single
    one."""

    def on_shard(pool: Pool, batch: Batch, ids: Int[Array, " blocks"]) -> Pool:
        blocks = pool.reshape(spec.views[group])
        if batch.shape[1] == 1:  # XLA:CPU would turn a scatter of one block into a select over the pool
            written = lax.dynamic_update_slice_in_dim(blocks, batch[0], ids[0], axis=0)
        else:
            written = blocks.at[ids].set(batch[0], mode="drop")
        return written.reshape(pool.shape)

    tensor = PartitionSpec(TENSOR_AXIS)
    return jax.jit(_sharded(on_shard, mesh, (tensor, tensor, PartitionSpec())), donate_argnums=0)


def _sharded(on_shard: Callable[..., Any], mesh: Mesh, in_specs: tuple[PartitionSpec, ...]) -> Callable[..., Any]:
    return jax.shard_map(on_shard, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(TENSOR_AXIS), check_vma=False)

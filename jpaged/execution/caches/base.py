"""Defines a kind of layer for the engine: a `LayerCache` owns the use of one layer group's blocks.

A kind of layer is one file with one `LayerCache`, and a line in `jpaged.execution.caches.registry`. Its host half says
how many bytes a block takes, which blocks a sequence still needs (a `Policy` of `jpaged.memory`) and which arrays a
step brings; its device half is the operation that the model calls. Everything else of the engine goes through this
interface, for a layer whose blocks are in the tables of sequences. By their class are known: adapters and encoded
images, whose blocks no table holds and which are filled apart from the step; and, in training, the kinds that a launch
of one token a sequence can be made of (`jpaged.training.exact`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Shaped

from jpaged.execution.mesh import HostOrDevice
from jpaged.memory.layout import GroupLayout, GroupSpec, spread_checkpoints
from jpaged.memory.policies import Policy
from jpaged.model_api import LayerGroup
from jpaged.scheduling.step import Chunk, ScheduledStep
from pallas_kernels.platform import Impl

Pool: TypeAlias = Shaped[Array, "shards pages rows 128"]
"""The one array that holds all blocks; each shard's part, ``[1, pages, rows, 128]``, is a reshape of every view."""


@dataclass(frozen=True)
class BlockSettings:
    """Settings that the blocks of all layer groups share.

    Attributes:
        block_size: tokens a block.
        dtype: dtype of the pool's elements.
        shards: tensor shards; each holds its own share of every block.
        tile: rows of which a block is a multiple, see `pallas_kernels.kv_codes.block_rows`.
        state_interval: tokens between the checkpoints of recurrent layers, a multiple of `block_size`.
        spreads_states: whether those inside prompts lie further apart where states are large, see
            `spread_checkpoints`.
        most_drafts: most drafts of a sequence that a step verifies; 0 = none are.
    """

    block_size: int
    dtype: jnp.dtype
    shards: int
    tile: int = 1
    state_interval: int = 512
    spreads_states: bool = False
    most_drafts: int = 0


class HostStep(NamedTuple):
    """Describes a step as the host knows it, before padding; a kind of layer makes its arrays from it.

    Attributes:
        planned: the step as the scheduler made it; its chunks are the sequences of the batch.
        starts, lengths: the chunks' starts and lengths, in tokens.
        seq_of_token: which chunk each token belongs to.
        positions: the tokens' positions in their sequences.
        padded_tokens, padded_seqs: numbers of tokens and sequences that arrays are padded to.
        rows: what tokens read of what requests hold, by its kind, see `jpaged.scheduling.held`; a kind is missing where
            the step's shape has no place for any of it.
        memo: what `LayerCache.memo` made for the batches of this builder.
    """

    planned: ScheduledStep
    starts: Int[np.ndarray, " seqs"]
    lengths: Int[np.ndarray, " seqs"]
    seq_of_token: Int[np.ndarray, " tokens"]
    positions: Int[np.ndarray, " tokens"]
    padded_tokens: int
    padded_seqs: int
    rows: Mapping[str, Sequence[Any]] = MappingProxyType({})
    memo: Any = None

    @property
    def chunks(self) -> Sequence[Chunk]:
        """Return what is computed, one chunk a sequence of the batch; a step makes them on first use."""
        return self.planned.chunks

    def first_rows(self) -> dict[int, int]:
        """Return for each sequence, by its id, the row of a token less the token's position."""
        firsts = np.cumsum(self.lengths) - self.lengths - self.starts
        return {chunk.seq.seq_id: int(first) for chunk, first in zip(self.chunks, firsts, strict=True)}


class NextDecodes(NamedTuple):
    """Describes a step that decodes one token each of the sequences of the step before, and no others.

    Attributes:
        positions: positions of their tokens, one more than before.
        changed: rows of the sequences whose tables changed.
    """

    positions: Int[np.ndarray, " seqs"]
    changed: list[int]


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """Describes the step that a layer's operation belongs to, while it is traced.

    Attributes:
        mesh: the engine's devices.
        query_starts: sequence s owns tokens ``[query_starts[s], query_starts[s + 1])``.
        kv_lens: tokens of each sequence once this step's are computed.
        arrays: what `LayerCache.batch` made for this step.
        views: shapes on one device of the pool as each of the kind's pool groups sees it.
        max_query_len: most tokens of a sequence, where that is known when the step is compiled.
        impl: which kernels run; None = what the current platform is best at.
        alone: whether no token of a step of single tokens reads what another one writes: they are the only ones of
            their sequences.
        prepared: what `LayerCache.prepare` made for this step, and the calls of all layers share.
    """

    mesh: Mesh
    query_starts: Int[HostOrDevice, " seqs+1"]
    kv_lens: Int[HostOrDevice, " seqs"]
    arrays: Any
    views: tuple[tuple[int, ...], ...]
    max_query_len: int | None
    impl: Impl | None
    alone: bool = False
    prepared: Any = None


class Reads(NamedTuple):
    """Counts the reads of a layer group to compute one token, for estimates of speed.

    Attributes:
        token_bytes: bytes of the pool that are read for each token seen, on one device, over all layers.
        most_tokens: tokens seen at most; None = all before it.
        lanes: numbers that each query head multiplies with each token seen, once for its score and once for its
            value, over all layers.
    """

    token_bytes: float
    most_tokens: int | None
    lanes: int


@dataclass(frozen=True)
class LayerCache(ABC):
    """Defines the use of the pool's blocks by one layer group of the model.

    It holds no state: blocks lie in the pool, whose views are pure reshapes, and which block is whose the host says.
    A kind that keeps another dtype than the pool's bitcasts the blocks it has read, never the pool.

    Attributes:
        group: the layer group as the model declares it.
        format: the format of the blocks.
        Batch: named tuple of the arrays that `batch` makes.
    """

    group: LayerGroup
    format: BlockSettings
    Batch: ClassVar[type[tuple[Any, ...]]]
    by_token: ClassVar[tuple[str, ...] | None] = None
    """Arrays of a `Batch` with an entry for each token; None = a step's tokens cannot be computed one by one."""
    by_seq: ClassVar[tuple[str, ...]] = ()
    """Arrays of a `Batch` with an entry for each sequence."""
    follows: ClassVar[bool] = False
    """True if `follow` makes the arrays of decodes from those of the step before. Such a kind has one pool group and
    one `table`, and no `PoolWork.given` adds to its arrays. A subclass with another `batch` overrides this or `follow`.
    """
    skips_unread_rows: ClassVar[bool] = False
    """True if `operate` takes `last_keys` of -1, see `jpaged.model_api.Attend`, or if results are not per token."""

    # ------------------------------------------------------------------ memory

    @property
    @abstractmethod
    def layer_shape(self) -> tuple[int, ...]:
        """Return the shape of one layer's part of one block, on one device; the last axis is 128."""

    @abstractmethod
    def pool_groups(self) -> tuple[GroupSpec, ...]:
        """Return the pool groups that the layers need, mostly one: bytes, tokens and policy of its blocks. See
        `spec`."""

    @abstractmethod
    def reads(self) -> Reads:
        """Return the reads of one token."""

    def spec(self, name: str, num_layers: int, policy: Policy, **options: Any) -> GroupSpec:
        """Return the pool group of `num_layers` layers whose blocks live as `policy` says; `options` are those of
        `GroupSpec`."""
        layer_bytes = prod(self.layer_shape) * self.format.dtype.itemsize
        return GroupSpec(name, layer_bytes, num_layers, self.format.block_size, policy, **options)

    def view(self, layout: GroupLayout) -> tuple[int, ...]:
        """Return the shape of the whole pool on one device as blocks of a pool group, ``[blocks, layers,
        *layer_shape]``."""
        return (layout.num_blocks, layout.padded_layers, *self.layer_shape)

    # ------------------------------------------------------------------ a step's arrays, on the host

    @abstractmethod
    def batch(
        self, step: HostStep, tables: Sequence[Int[np.ndarray, "padded_seqs pages"]], layouts: Sequence[GroupLayout]
    ) -> Any:
        """Return the arrays of a step, a `Batch`, padded so that padding reads and writes no block.

        Args:
            tables: one for each of the pool groups, logical block -> physical block of the batch's sequences; -1 where
                there is none.
            layouts: the pool groups as they lie in the pool.

        Raises:
            RuntimeError: a token has no block to be written to.
        """

    def follow(self, arrays: Any, step: NextDecodes, layouts: Sequence[GroupLayout]) -> None:
        """Turn the arrays of decodes into those that `batch` would make of the same sequences' next tokens; their
        `table` is up to date.

        Raises:
            RuntimeError: as `batch`.
        """
        raise NotImplementedError(f"layer group {self.group.name!r} ({self.group.kind}) does not follow")

    def memo(self) -> Any:
        """Return what the batches of one builder share, which `batch` may change: it finds it in `HostStep.memo`."""
        return None

    def table_width(self, spec: GroupSpec, max_model_len: int) -> int:
        """Return how many entries a pool group's block table has for the longest sequence."""
        return -(-max_model_len // spec.block_size)

    def untabled_blocks(self, step: ScheduledStep) -> Iterable[int]:
        """Return the blocks of the first pool group that a step reads and that are in no sequence's table."""
        return ()

    def one_by_one(self, arrays: Any, rows: slice | Int[np.ndarray, " rows"], seqs: Int[np.ndarray, " rows"]) -> Any:
        """Return the arrays of a step of only the tokens in `rows`, each as a separate sequence.

        Args:
            arrays: the arrays of the whole step.
            seqs: which sequence of the whole step each of the tokens belongs to.

        Raises:
            ValueError: layers of this kind cannot be computed so.
        """
        if self.by_token is None:
            raise ValueError(
                f"deterministic=True: layer group {self.group.name!r} ({self.group.kind}) cannot be computed token by "
                "token"
            )
        entries = dict.fromkeys(self.by_token, rows) | dict.fromkeys(self.by_seq, seqs)
        found = {name: getattr(arrays, name) for name in entries}
        return arrays._replace(**{name: array[entries[name]] for name, array in found.items() if array is not None})

    def together(self, arrays: Any, rows: slice | np.ndarray, seq: int) -> Any:
        """Return the arrays of a step of only the tokens in `rows`, those of an image that see each other, and padding.

        Args:
            arrays: the arrays of the whole step.
            seq: which sequence of the whole step they belong to.

        Raises:
            ValueError: layers of this kind cannot be computed so.
        """
        return LayerCache.one_by_one(self, arrays, rows, np.array([seq]))

    def last_seen(self, arrays: Any) -> Int[np.ndarray, " tokens"] | None:
        """Return the position of the last token that each token of a step sees; None = its own."""
        return None

    # ------------------------------------------------------------------ a layer, on the devices

    def prepare(self, call: LayerCall, num_tokens: int) -> Any:
        """Compute on the devices, before the first layer, values that depend on the batch alone and that all layers
        use.

        Layers are a loop in the compiled program: what `operate` computes is computed for each of them. None by
        default: nothing is.

        Args:
            call: the step; its `prepared` is not made yet.
            num_tokens: rows of the batch, with padding.
        """
        return None

    @abstractmethod
    def operate(
        self, call: LayerCall, pool: Pool, index: int | Int[Array, ""], *operands: Any, **options: Any
    ) -> tuple[Pool, Any]:
        """Read and write the blocks of one layer of the group; the model asks for it by calling the engine.

        Args:
            pool: the pool, which is updated in place: what comes back takes its place.
            index: the layer's place in ``group.layers``; traced in a scan.
            operands, options: what the kind defines, see `jpaged.model_api.Attend` for attention.
        """


def group_specs(caches: Iterable[LayerCache]) -> list[GroupSpec]:
    """Return the pool groups of all layer groups, in order."""
    caches = list(caches)
    specs = [spec for cache in caches for spec in cache.pool_groups()]
    return spread_checkpoints(specs) if any(cache.format.spreads_states for cache in caches) else specs

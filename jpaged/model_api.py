"""The contract between the engine and a model family.

A family is a Flax NNX module found through the entry-point group ``jpaged.models`` under its Hugging Face
``model_type``. It tells the engine three things: which layers keep KV memory of which shape and life
(`LayerGroup`), where each parameter comes from (`WeightSource`), and how tokens become hidden states with
attention left to the engine's `Attend` callback, which owns the paged pool.

Dimension letters used everywhere:

    tokens     rows of the ragged batch (T)        seqs      sequences of the batch (S)
    kv_heads   KV heads (after head layout)        q_per_kv  query heads that share one KV head
    head_dim   width of a head                     embed     width of the residual stream
    vocab      padded vocabulary                   blocks    physical blocks of a layer group
    layers     layers of a group (or a stack)      tiles     128-lane tiles of one token's K and V
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import PartitionSpec
    from jaxtyping import Array, Float, Int

    from pallas_kernels.platform import Impl

TENSOR_AXIS = "tensor"
"""Mesh axis over which heads, MLP columns and the vocabulary are sharded."""

UNROLL_LAYERS: ContextVar[bool] = ContextVar("unroll_layers", default=False)
"""Whether a model that is traced runs layers that are not stacked one after the other, without a loop. The engine
sets it for GPUs: XLA:GPU copies a layer's weights out of a stack at every step, and waits for the host at branches."""

PRODUCT_IMPL: ContextVar[Impl] = ContextVar("product_impl", default="xla")
"""Which version of `pallas_kernels.matmul` multiplies in a model that is traced. The engine asks for another than XLA's
where one device holds all weights."""

LIVE_ROWS: ContextVar[Int[Array, ""] | None] = ContextVar("live_rows", default=None)
"""How many rows, the first ones, are a step's tokens or samples; products of the others, padding, may be skipped. None:
all."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose KV memory has the same shape and the same life (Jenga, section 4).

    Attributes:
        name: unique within the model, e.g. ``"full"`` or ``"window"``.
        layers: numbers of the model's layers that keep KV, ascending; a layer's place in this tuple is its index in
            the group's view.
        kv_heads: KV heads over all tensor shards, as laid out by `head_layout` (a multiple of the shards).
        head_dim: width of one head, unpadded.
        sliding_window: tokens a query sees, itself included; None = all before it.
        chunk_size: a query sees only its own chunk, the tokens whose ``position // chunk_size`` is its own.
        readers: how many further layers read the KV of these and keep none.
        prompt_budget: tokens of a prompt that are kept once it is computed; set by the engine, see
            `jpaged.pyramid_kv`.

    Raises:
        ValueError: both a window and chunks.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    chunk_size: int | None = None
    readers: int = 0
    prompt_budget: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.chunk_size is not None:
            raise ValueError(
                f"sliding_window={self.sliding_window} and chunk_size={self.chunk_size} exclude each other"
            )


@dataclass(frozen=True)
class LayerRef:
    """Which cache rows a layer uses: a static group name and the layer's index in it (int, or traced in a scan)."""

    group: str
    index: int | Int[Array, ""]


class Attend(Protocol):
    """Writes this step's K and V into the paged cache and attends over each token's own sequence.

    `sinks` are logits, one a query head, that take their share of the softmax and give nothing.
    Without `k` and `v` it only reads: what another layer of the same step wrote, and of the steps before.

    The cache is opaque to the model and must be threaded through: what comes back replaces what went in
    (it is donated). Queries are causal by position; the group's window or chunks apply by themselves.
    """

    def __call__(
        self,
        cache: Any,
        layer: LayerRef,
        q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"] | None,
        v: Float[Array, "tokens kv_heads head_dim"] | None,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
    ) -> tuple[Any, Float[Array, "tokens kv_heads q_per_kv head_dim"]]: ...


class HostArray(Protocol):
    """An array on the host that may be read only where it is sliced; NumPy's are."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray | HostArray:
        """A part, by a slice for each axis."""
        ...

    def __array__(self, dtype: Any = None, copy: bool | None = None, /) -> np.ndarray:
        """All of it, see `numpy.asarray`."""
        ...


@dataclass(frozen=True)
class WeightSource:
    """Where one parameter (or one layer's slice of a stacked parameter) comes from.

    Attributes:
        path: attribute path of the parameter in the model, e.g. ``("embed_tokens",)``; for a layer's parameter
            the path inside that layer, e.g. ``("attention", "qkv")``.
        sources: tensor names in a Hugging Face checkpoint, in the order `convert` takes them.
        convert: host arrays (as stored) -> array of the parameter's shape, of which processes read the slices that
            their devices hold, if it is lazy. Pure NumPy; dtype is cast afterwards.
        partition: how the (unstacked) parameter is sharded over the mesh.
        layer: model layer number, or None for a parameter outside the layers.
        contracted: axis of the (unstacked) parameter that products sum over, counted from the end, if it may be
            quantised: the engine then puts a `pallas_kernels.quantised.QuantisedMatrix` in its place.
        unit: `convert` keeps this many neighbours along `contracted` together (a head); 0 = all of them.
    """

    path: tuple[str, ...]
    sources: tuple[str, ...]
    convert: Callable[..., HostArray]
    partition: PartitionSpec
    layer: int | None = None
    contracted: int | None = None
    unit: int = 0


@runtime_checkable
class CausalLM(Protocol):
    """What a family's NNX module offers. Built with ``cls(config, dtype=, tensor_parallel=, stacked=, rngs=)``.

    A family with experts also takes ``expert_parallel=True``: whole experts are spread over the devices of the mesh.
    It is called under the engine's mesh (`jax.sharding.use_abstract_mesh`), so a `jax.shard_map` need not name one.

    ``stacked=True`` stacks the layers of each repeating pattern and scans over them (TPUs: compile time and argument
    count do not grow with depth); ``stacked=False`` keeps one parameter set a layer (XLA:CPU and XLA:GPU would copy
    each layer's weights out of the stack at every step) in a loop, or in none, as `UNROLL_LAYERS` says.
    Raises ValueError from the constructor, naming the field, when the config asks for what is not implemented.
    """

    layer_groups: tuple[LayerGroup, ...]
    vocab_size: int
    """Unpadded; logits beyond it are -inf."""

    def weights(self) -> Iterable[WeightSource]:
        """Every parameter's source, in checkpoint order where possible (streaming reads each tensor once)."""
        ...

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """(path in ``nnx.state(model)``, index on the leading stack axis or None) of a weight source's target."""
        ...

    def __call__(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], cache: Any, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        """Final-norm hidden states of every token and the updated cache."""
        ...

    def logits(self, hidden: Float[Array, "seqs embed"]) -> Float[Array, "seqs vocab"]:
        """Float32 logits over the padded vocabulary, -inf beyond ``vocab_size``."""
        ...


@dataclass(frozen=True)
class HeadLayout:
    """How query and KV heads are laid over tensor shards: kv-major slots, each slot one KV head with its queries.

    ``kv_of_slot[s]`` is the checkpoint's KV head in slot s (-1: a padding slot, zero weights);
    ``q_of_slot[s]`` its ``q_per_kv`` query heads (-1: padding). Slots are a multiple of the shards, so every
    shard holds whole slots. KV heads are replicated when there are fewer of them than shards; a replica serves
    its own share of the queries.
    """

    kv_of_slot: tuple[int, ...]
    q_of_slot: tuple[tuple[int, ...], ...]

    @property
    def kv_heads(self) -> int:
        return len(self.kv_of_slot)

    @property
    def q_per_kv(self) -> int:
        return len(self.q_of_slot[0])


def head_layout(num_heads: int, num_kv_heads: int, shards: int) -> HeadLayout:
    """Place heads on shards; see `HeadLayout`.

    >>> head_layout(6, 2, 1).q_of_slot
    ((0, 1, 2), (3, 4, 5))
    >>> head_layout(6, 2, 4).kv_of_slot, head_layout(6, 2, 4).q_of_slot
    ((0, 0, 1, 1), ((0, 1), (2, -1), (3, 4), (5, -1)))

    Raises:
        ValueError: when the query heads do not divide over the KV heads.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    group = num_heads // num_kv_heads
    replicas = -(-shards // num_kv_heads) if shards > num_kv_heads else 1
    share = -(-group // replicas)
    kv_of_slot: list[int] = []
    q_of_slot: list[tuple[int, ...]] = []
    for kv in range(num_kv_heads):
        heads = list(range(kv * group, (kv + 1) * group))
        for r in range(replicas):
            mine = heads[r * share : (r + 1) * share]
            kv_of_slot.append(kv)
            q_of_slot.append(tuple(mine + [-1] * (share - len(mine))))
    while len(kv_of_slot) % shards:
        kv_of_slot.append(-1)
        q_of_slot.append((-1,) * share)
    return HeadLayout(tuple(kv_of_slot), tuple(q_of_slot))


def padded(size: int, shards: int) -> int:
    """`size` rounded up to a multiple of `shards` (zero-padded MLP columns and vocabulary rows)."""
    return -(-size // shards) * shards

"""Says what layers keep in the pool: a layer group is the layers whose memory has the same shape and the same life."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from jaxtyping import Array, Int


@dataclass(frozen=True)
class LayerGroup(ABC):
    """Layers whose memory has the same shape and the same life (Jenga, section 4).

    A subclass says what its layers keep. The engine finds the code that keeps it by `kind`.

    Attributes:
        name: unique within the model, e.g. ``"full"`` or ``"window"``.
        layers: numbers of the model's layers that keep something, ascending; a layer's place in this tuple is its
            index in the group. A layer may be in two groups, as one of Falcon-H1, which attends and keeps a state.
    """

    name: str
    layers: tuple[int, ...]

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return what kind of layer it is, see `jpaged.execution.caches.registry`."""


@dataclass(frozen=True)
class AttentionGroup(LayerGroup):
    """Layers that keep a K and a V of each token.

    Attributes:
        kv_heads: KV heads over all tensor shards, as laid out by `head_layout` (a multiple of the shards).
        head_dim: width of one head, unpadded.
        sliding_window: tokens a query sees, itself included; None = all before it.
        chunk_size: a query sees only its own chunk, the tokens whose ``position // chunk_size`` is its own.
        readers: number of further layers that read the KV of these and keep none.
        sees_images: whether the tokens of an image see all tokens of that image, also later ones.
        q_per_kv: query heads of a KV head, alike in all layers, so that a step can plan for all of them at once; None =
            unknown, and each layer plans for itself. It says nothing of what is kept and is not compared.

    Raises:
        ValueError: both a window and chunks are given.
    """

    kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    chunk_size: int | None = None
    readers: int = 0
    sees_images: bool = False
    q_per_kv: int | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        if self.sliding_window is not None:
            return "sliding window"
        return "full attention" if self.chunk_size is None else "chunked attention"

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.chunk_size is not None:
            raise ValueError(
                f"sliding_window={self.sliding_window} and chunk_size={self.chunk_size} exclude each other"
            )


@dataclass(frozen=True)
class ImageGroup(LayerGroup):
    """Results of an encoder of images, kept until the language model's tokens took it and, while there is room, for the
    next request with the same image.

    Attributes:
        width: width of the vectors, that of the language model's hidden states.
        dtype: name of the dtype they are kept in, whatever the pool's.
        whole: whether all tokens of an image have to be computed in one step, because they see each other.
        axes: on how many axes a token has a place, by which the model rotates its queries and keys; see `PlaceOnAxes`.
            1 = it has its position in the sequence alone.
        levels: vectors of `width` numbers in a feature. The first takes the place of its token's hidden state, each
            further one is added to what leaves one of the first layers (DeepStack, Meng et al., 2024, section 3).
        patches: name of an array of an item that has an entry for each of its patches; "" = features are counted.
        work: what the encoder computes for each of these, over what the text model computes for a token. Encoding an
            item takes so much of a step's budget.
        rounds: layers of each part that an encoder may stop after, see `EncodesInParts`; () = it runs as a whole.

    Raises:
        ValueError: the width, the number of axes or of levels, or the work is not positive.
    """

    width: int
    dtype: str = "float32"
    whole: bool = False
    axes: int = 1
    levels: int = 1
    patches: str = ""
    work: float = 1.0
    rounds: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return "image features"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"layer group {self.name!r}: width={self.width} must be positive")
        if self.axes < 1 or self.levels < 1:
            raise ValueError(f"layer group {self.name!r}: axes={self.axes} and levels={self.levels} must be positive")
        if not self.work > 0:
            raise ValueError(f"layer group {self.name!r}: work={self.work} must be positive")


@dataclass(frozen=True)
class CrossAttentionGroup(LayerGroup):
    """Layers that attend to images: they keep a K and a V of each of an image's features, made once by the encoder, and
    none of the tokens that read them (Llama 3.2 Vision).

    A token reads the image that comes last before it and, where several follow one another without text in between,
    those of them that do not come after it. Text before the first image reads none.

    Attributes:
        kv_heads, head_dim: see `AttentionGroup`.
        image_tokens: features of the largest image.

    Raises:
        ValueError: an image has no features.
    """

    kv_heads: int
    head_dim: int
    image_tokens: int

    most_together: ClassVar[int] = 4
    """Images that may follow one another without text in between."""

    whole: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return "cross attention"

    def __post_init__(self) -> None:
        if self.image_tokens < 1:
            raise ValueError(f"layer group {self.name!r}: image_tokens={self.image_tokens} must be positive")


@dataclass(frozen=True)
class LatentGroup(LayerGroup):
    """Layers that keep of each token one latent, of which every head makes its own K and V, and one rotated key that
    all heads share (multi-head latent attention; DeepSeek-V2, 2024, section 2.1).

    Every tensor shard keeps all of it, as all heads read it.

    Attributes:
        rank: width of the latent.
        rotary: width of the rotated key.
        heads: heads of all tensor shards together that read the latents; see `AttentionGroup.q_per_kv`.

    Raises:
        ValueError: a width is not positive.
    """

    rank: int
    rotary: int
    heads: int | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        return "latent attention"

    @property
    def width(self) -> int:
        """Return how many elements a token takes in a layer, without padding."""
        return self.rank + self.rotary

    def __post_init__(self) -> None:
        if self.rank < 1 or self.rotary < 1:
            raise ValueError(f"layer group {self.name!r}: rank={self.rank} and rotary={self.rotary} must be positive")


@dataclass(frozen=True)
class StatePart:
    """One array of the state that a recurrent layer keeps of a sequence.

    Attributes:
        name: unique within the layer, e.g. ``"conv"``.
        shape: of one sequence's, over all tensor shards, which split the first axis.
        dtype: name of the dtype it is kept in, whatever the pool's.

    Raises:
        ValueError: the shape is empty or has a size below 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"state part {self.name!r}: shape={self.shape} needs positive sizes, at least one")


@dataclass(frozen=True)
class StateGroup(LayerGroup):
    """Layers that keep a state of fixed size, which stands for all tokens so far (Mamba, DeltaNet, short convolution).

    Attributes:
        parts: the arrays of one layer's state.

    Raises:
        ValueError: there are no parts, or two of one name.
    """

    parts: tuple[StatePart, ...]

    @property
    def kind(self) -> str:
        return "state"

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"layer group {self.name!r}: parts need distinct names, at least one: got {names}")


@dataclass(frozen=True)
class PreviousTokenGroup(LayerGroup):
    """A vector of each sequence's newest token, which the token after it reads: what a head that drafts joins with its
    own token.

    Tensor shards keep a part of each vector.

    Attributes:
        width: of the vectors, over all tensor shards.
        dtype: name of the dtype they are kept in, whatever the pool's.

    Raises:
        ValueError: the width is not positive.
    """

    width: int
    dtype: str = "float32"

    @property
    def kind(self) -> str:
        return "previous token"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"layer group {self.name!r}: width={self.width} must be positive")


@dataclass(frozen=True)
class AdapterSite:
    """A matrix of the model, of one layer or of several alike, that low-rank adapters change.

    Attributes:
        name: for messages, e.g. ``"attention.qkv"``.
        paths: where the matrices lie in the model's state: one path for a stack of layers, or one for each layer.
        stacked: whether it is one path for a stack.
        layers: number of layers.
        inputs, outputs: the matrix' shape, over all tensor shards.
        parts: tensors of a checkpoint that it is made of, side by side along its outputs.
        part_of_column: which of them each column belongs to, one byte a column; padding belongs to any.
        split: which side is spread over the tensor shards: "inputs", "outputs" or None.
    """

    name: str
    paths: tuple[tuple[str | int, ...], ...]
    stacked: bool
    layers: int
    inputs: int
    outputs: int
    parts: int
    part_of_column: bytes
    split: str | None

    def local(self, shards: int) -> tuple[int, int]:
        """Return the inputs and outputs that one of so many shards has."""
        inputs = self.inputs // shards if self.split == "inputs" else self.inputs
        return inputs, self.outputs // shards if self.split == "outputs" else self.outputs

    def row_elements(self, shards: int) -> int:
        """Return how many numbers one rank of an adapter takes on each shard, over all layers: for each layer a row of
        A for every part, and a column of B."""
        inputs, outputs = self.local(shards)
        return self.layers * (self.parts * inputs + outputs)


@dataclass(frozen=True)
class AdapterGroup(LayerGroup):
    """The matrices of low-rank adapters, which are loaded into the pool while requests run with them.

    Attributes:
        sites: the matrices that adapters may change, in the order in which an adapter's blocks have them.
        rank: largest rank.
        adapters: most different adapters of a step.
        dtype: name of the dtype that they are kept in, whatever the pool's.
        block_layers, block_rows: shape of a block, in layers of rows of 128 of the pool's elements: that of the model's
            smallest block, so that large pages stay as they are.
        in_turn: whether a row's adapter is computed by itself on every platform, so that no bit depends on the others.
    """

    sites: tuple[AdapterSite, ...]
    rank: int
    adapters: int
    dtype: str
    block_layers: int = 1
    block_rows: int = 1
    in_turn: bool = False

    @property
    def kind(self) -> str:
        return "low-rank adapters"


@dataclass(frozen=True)
class LayerRef:
    """The blocks that a layer uses: a static group name and the layer's index in it (int, or traced in a scan).

    Attributes:
        of_model: the group is one of the model that a `jpaged.model_api.DraftHead` drafts for, and the index is counted
            from its end: -1 is the last layer's.
    """

    group: str
    index: int | Int[Array, ""]
    of_model: bool = False

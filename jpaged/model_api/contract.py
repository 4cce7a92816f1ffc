"""States what a model family's module is built with, what it offers, and what the engine does for its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from flax import nnx
    from jaxtyping import Array, Bool, Float, Int

    from jpaged.model_api.layer_groups import (
        AttentionGroup,
        CrossAttentionGroup,
        ImageGroup,
        LayerGroup,
        LayerRef,
    )
    from jpaged.model_api.weight_source import Bfloat16Tiles, WeightSource
    from pallas_kernels.platform import Impl


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Describes the parameters and devices of a model that is being built.

    A family's constructor takes it as its second argument and hands it on to its parts.

    Attributes:
        dtype: the dtype of parameters, unless the family fixes another for some of them.
        tensor_parallel: number of shards of the heads, the MLP and the vocabulary.
        expert_parallel: whether whole experts are spread over the shards, instead of each expert's columns. A family
            without experts refuses it.
        stacked: whether the layers of each repeating pattern are stacked and scanned over. TPUs want it: compile time
            and the number of arguments do not grow with depth. XLA:CPU would copy each layer's weights out of the stack
            at every step; XLA:GPU does, where Triton's kernels are not used.
        unrolled: whether layers that are not stacked follow one another, without a loop. GPUs want it, as XLA:GPU asks
            the host which branch of a `jax.lax.switch` to take.
        product_impl: the version of `pallas_kernels.matmul` and `pallas_kernels.quantised_matmul` that multiplies;
            ``cpu`` where one CPU holds all weights only.
        column_unit: experts' columns on a device are padded with zeros to a multiple of it where that adds at most a
            third, so that a kernel takes them: the lanes of a TPU's registers, elsewhere 1.
        bfloat16_tiles: how matrices that products read are held in bfloat16 in tiles, whatever `dtype` is; None = not.
            It has ``cpu`` for `product_impl`. ``BFLOAT16_PRODUCT`` is a CPU's form of bfloat16; the others take half
            of the memory of float32 for what a checkpoint stores in bfloat16, and compute as float32 does.
        longest: most tokens of a sequence that the model will see; None = as many as its config says.
        rngs: draws random parameters; None while nothing is built (see `dataclasses.replace`).
        shapes_only: only the parameters' shapes are wanted: nothing needs to be drawn, whose tracing takes a second.
    """

    dtype: np.dtype
    tensor_parallel: int = 1
    expert_parallel: bool = False
    stacked: bool = False
    unrolled: bool = False
    product_impl: Impl = "xla"
    column_unit: int = 1
    bfloat16_tiles: Bfloat16Tiles | None = None
    longest: int | None = None
    rngs: nnx.Rngs | None = field(default=None, compare=False, repr=False)
    shapes_only: bool = field(default=False, compare=False, repr=False)


class Attend(Protocol):
    """Runs a layer of an `AttentionGroup` in the engine: it writes this step's K and V into the paged cache and
    attends over each token's own sequence.

    The same callback serves layers of every kind; those of another kind call it with other arguments after `layer`.
    For a layer of a `StateGroup` it is a `Recur`, of a `LatentGroup` an `AttendToLatents`, of a `CrossAttentionGroup`
    an `AttendToImages`, for an `ImageGroup` a `PlaceImageFeatures`, for a `PreviousTokenGroup` a `TakePreviousToken`.

    `sinks` are logits, one a query head, that take their share of the softmax and give nothing.
    Without `k` and `v` it only reads: what another layer of the same step wrote, and of the steps before.
    `last_keys` are given where a model skips unread rows (`SkipsUnreadRows`): the position of the last token
    that each token sees, which is its own, or -1 for a token whose result may be anything.
    `seen` is given where a head that drafts reads what its model keeps (`LayerRef.of_model`), a token of each sequence:
    how many of the sequence's tokens its query sees. A window shows those that it shows the token after them.
    With `sees_ahead` a token sees the tokens after it too, as far as the step has any of its sequence.

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
        last_keys: Int[Array, " tokens"] | None = None,
        seen: Int[Array, " tokens"] | None = None,
        sees_ahead: bool = False,
    ) -> tuple[Any, Float[Array, "tokens kv_heads q_per_kv head_dim"]]: ...


class AttendWithinPrompts(Protocol):
    """Runs attention of an encoder (`PromptEncoder`) in the engine: each token sees its whole prompt, the tokens after
    it too, and nothing is kept.

    It is the same callback as `Attend`, called with None in the place of a layer. A step has whole prompts only.

    Args:
        reach: tokens that a query sees on each side of its own; None = all of its prompt.
        distance_bias: added to the scaled scores of each query head, by the distance from the query to the key: the
            middle column is that of distance 0, and larger distances than there are columns take the last one.
    """

    def __call__(
        self,
        cache: Any,
        layer: None,
        q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        *,
        scale: float,
        reach: int | None = None,
        distance_bias: Float[Array, "kv_heads q_per_kv distances"] | None = None,
    ) -> tuple[Any, Float[Array, "tokens kv_heads q_per_kv head_dim"]]: ...


class AttendToLatents(Protocol):
    """Runs a layer of a `LatentGroup` in the engine: it writes this step's rows, each a latent and the rotated
    key after it, into the paged cache, and attends over each token's own sequence in the latents' space.

    Queries are given there too, with their rotated part last; heads are a multiple of the tensor shards, which split
    them. A row is its token's key, its latent the value, for all heads.

    The cache must be threaded through, as for `Attend`.
    """

    def __call__(
        self,
        cache: Any,
        layer: LayerRef,
        q: Float[Array, "tokens heads width"],
        rows: Float[Array, "tokens width"],
        *,
        scale: float,
    ) -> tuple[Any, Float[Array, "tokens heads rank"]]: ...


class Recur(Protocol):
    """Runs a layer of a `StateGroup` in the engine: it runs a recurrence over each sequence's tokens of this
    step, from the state of the steps before, and keeps the state that comes out.

    `kernel` is one of `pallas_kernels.recurrent`, called on each shard as ``kernel(view, layer, place, units,
    *operands, impl=impl, **options) -> (view, out)``; `part` names the `StatePart` that it reads and writes.
    `axes` says of each operand which axis is split over the tensor shards, None if each shard has all of it;
    `out_axis` says it of the result. An operand may be None.

    The cache must be threaded through, as for `Attend`.
    """

    def __call__(
        self,
        cache: Any,
        layer: LayerRef,
        part: str,
        kernel: Callable[..., tuple[Array, Array]],
        *operands: Array | None,
        axes: Sequence[int | None],
        out_axis: int,
        **options: Any,
    ) -> tuple[Any, Array]: ...


class TakePreviousToken(Protocol):
    """Returns for each token the vector of the token before it in its sequence, 0 for a sequence's first token, and
    keeps the vectors of this step for the next, in a `PreviousTokenGroup`.

    The cache must be threaded through, as for `Attend`.
    """

    def __call__(
        self, cache: Any, layer: LayerRef, vectors: Float[Array, "tokens width"]
    ) -> tuple[Any, Float[Array, "tokens width"]]: ...


class PlaceImageFeatures(Protocol):
    """Replaces the hidden states of tokens that stand for images by the features in an `ImageGroup`.

    `layer` names the group; its index is 0, or the number of the level of a feature that is added to the hidden states
    of such tokens. The cache must be threaded through, as for `Attend`.
    """

    def __call__(
        self, cache: Any, layer: LayerRef, hidden: Float[Array, "tokens embed"]
    ) -> tuple[Any, Float[Array, "tokens embed"]]: ...


class PlaceOnAxes(Protocol):
    """Returns where each token lies on the axes of an `ImageGroup` that has several: text at the same place on all.

    The same callback as `PlaceImageFeatures`, called with `positions`, those in the sequences, in the place of hidden
    states. The cache comes back as it went in.
    """

    def __call__(
        self, cache: Any, layer: LayerRef, *, positions: Int[Array, " tokens"]
    ) -> tuple[Any, Int[Array, "tokens axes"]]: ...


class AttendToImages(Protocol):
    """Runs a layer of a `CrossAttentionGroup` in the engine: each token attends to the image that it sees.

    It returns (result, whether each token sees an image); the result is 0 where it sees none. In a step without any
    image it returns None in the place of both. The cache must be threaded through, as for `Attend`.
    """

    def __call__(
        self,
        cache: Any,
        layer: LayerRef,
        q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
        *,
        scale: float,
    ) -> tuple[Any, tuple[Float[Array, "tokens kv_heads q_per_kv head_dim"], Bool[Array, " tokens"]] | None]: ...


@runtime_checkable
class TakesImages(Protocol):
    """The further methods of a `CausalLM` that takes images.

    Its groups have either an `ImageGroup`, with which it calls the engine where tokens become hidden states
    (`PlaceImageFeatures`), or a `CrossAttentionGroup`, whose layers call the engine (`AttendToImages`).
    """

    image_group: ImageGroup | CrossAttentionGroup
    encoder_parts: tuple[str, ...]
    """Attributes whose parameters `encode` alone uses."""

    prompt_vocab_size: int
    """Token ids of prompts are below it: what stands for an image need not be a token that can be drawn."""

    def encode(self, arrays: Mapping[str, Array]) -> Any:
        """Return what the engine is to keep of some images, from what an image processor made of them.

        For an `ImageGroup` that is what their tokens are to be, [images, features, levels * embed]; for a
        `CrossAttentionGroup` K and V of all its layers, a pair of [images, layers, features, kv_heads, head_dim]. What
        follows an image's features means nothing.

        Args:
            arrays: by name, each with a leading axis of images.
        """
        ...

    def padded(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return what an image processor made of one image, padded to one of few shapes: each is compiled for."""
        ...

    def examples(self) -> Iterable[tuple[Mapping[str, np.ndarray], int]]:
        """Yield arrays, as `padded` returns them, and the number of their features, for each shape that is worth being
        compiled before an image comes. An image of another shape is compiled for when the first one comes."""
        ...


@runtime_checkable
class Cuttable(Protocol):
    """The further method of a `CausalLM` whose first layers can draft for it."""

    def cut(self, layers: int) -> None:
        """Call only the first `layers` layers from now on, then the final norm as before; the parameters stay.

        Raises:
            ValueError: the model has no more than these, or cannot be cut there.
        """
        ...


@runtime_checkable
class Tappable(Protocol):
    """The further method of a `CausalLM` that can return the states within it (EAGLE-3, 2025, section 3.2)."""

    def tap(self, layers: tuple[int, ...]) -> None:
        """Return from now on, as a third result, the hidden states that enter each of these layers, side by side:
        [tokens, len(layers) * embed]. The number of all layers stands for what leaves the last one.

        Raises:
            ValueError: the model has no such layer.
        """
        ...


@runtime_checkable
class ScalesEmbedding(Protocol):
    """The attribute of a `CausalLM` whose embedding multiplies the rows of its table (Gemma), and of a `DraftHead` that
    embeds tokens as its model does."""

    embed_factor: float
    """By what, rounded to the parameters' dtype; 1 = by nothing. It belongs to the embedding: what a model multiplies
    its input by besides (Granite) is not in it. That of a head is 1 until it shares the table of a model."""


@runtime_checkable
class HasHeadBias(Protocol):
    """The attribute of a `CausalLM` whose vocabulary's head may have a bias (Phi-2), and of a `DraftHead` that adds
    that bias to its logits where it shares the model's head."""

    head_bias: Any
    """The parameter [vocab]; None = there is none. That of a head is None until it shares the table of a model."""


@runtime_checkable
class HasHeadTable(Protocol):
    """A model whose logits may be the plain product of hidden states and a table."""

    def head_table(self) -> Float[Array, "vocab embed"] | None:
        """Return the table whose rows' products with hidden states, in float32, are the logits of all tokens that can
        be drawn, and nothing else is; None where logits are more than that, or the table is no array of floats."""
        ...


@runtime_checkable
class SkipsUnreadRows(Protocol):
    """The attribute of a `CausalLM` whose last layer can skip rows that are not read."""

    skips_unread_rows: bool
    """True if ``__call__`` takes `read` [tokens], bool, after its other arguments: the tokens whose hidden states are
    read. Those of other tokens may be anything; K and V of all tokens are still written."""


@runtime_checkable
class CausalLM(Protocol):
    """The NNX module of a family. It is built with ``cls(config, build)``, `build` being a `BuildContext`.

    The constructor raises ValueError, naming the field, when the config or the context asks for what is not
    implemented. The engine builds models from shapes only (``nnx.eval_shape``), and fills their parameters itself.
    A model is called under the engine's mesh (`jax.sharding.use_abstract_mesh`), so a `jax.shard_map` need not name
    one.
    """

    layer_groups: tuple[LayerGroup, ...]
    vocab_size: int
    """Size of the vocabulary without padding; logits beyond it are -inf."""

    def weights(self) -> Iterable[WeightSource]:
        """Yield every parameter's source, in checkpoint order where possible (streaming reads each tensor once)."""
        ...

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target: (path in ``nnx.state(model)``, index on the leading stack axis or None)."""
        ...

    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        cache: Any,
        attend: Attend,
        live_rows: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        """Return the final-norm hidden states of every token and the updated cache.

        Args:
            live_rows: number of leading tokens that are not padding; what the model computes of the others does not
                matter, so it may leave their products out. None = all.
        """
        ...

    def logits(
        self, hidden: Float[Array, "seqs embed"], live_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "seqs vocab"]:
        """Return float32 logits over the padded vocabulary, -inf beyond ``vocab_size``; for `live_rows` see above."""
        ...


@dataclass(frozen=True)
class DraftBlock:
    """The tokens from which a head makes all drafts of a sequence in one call: its newest one, and masks.

    Attributes:
        mask_token: the token that stands where a draft is to be made.
        size: most tokens of a block, the newest one included.
    """

    mask_token: int
    size: int


@runtime_checkable
class DraftHead(Protocol):
    """The NNX module of a head that drafts for a `CausalLM` from its hidden states.

    It is what a `CausalLM` is, with these differences. It keeps the hidden state of a sequence's newest token in a
    `PreviousTokenGroup`, so that at each token it reads that of the token before, unless it makes blocks. Its embedding
    or vocabulary's head may be the model's.
    """

    layer_groups: tuple[LayerGroup, ...]
    vocab_size: int

    tables: tuple[str, ...]
    """Attributes whose parameters are those of the model's attributes of these names, unless `weights` names tensors
    for them that the checkpoint has and that hold other numbers."""
    states: int
    """Width of what it reads of each of the model's tokens."""

    reads: tuple[AttentionGroup, ...]
    """The model's groups whose last layer's KV its layers attend to, by name, without the layers; see
    `LayerRef.of_model`. () = it keeps KV of its own."""

    block: DraftBlock | None
    """How it makes all drafts of a sequence in one call: the logits at a mask are of the draft in its place. None: it
    makes one a call, from the logits at the token before."""

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a model of so many whose entering states the head reads, see `Tappable`; () = it reads
        the model's final hidden states."""
        ...

    def weights(self) -> Iterable[WeightSource]:
        """See `CausalLM.weights`."""
        ...

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """See `CausalLM.locate`."""
        ...

    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        cache: Any,
        attend: Attend,
        live_rows: Int[Array, ""] | None = None,
        *,
        target: Float[Array, "tokens states"] | None = None,
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        """Return the final-norm hidden states of every token and the updated cache.

        Args:
            target: the states of the same tokens that the model returned, final ones or those of `taps`. None: it has
                not computed them yet, as they are drafts or the token before the first of them, and the head's own
                results stand for it at the tokens after.
        """
        ...

    def logits(
        self, hidden: Float[Array, "seqs embed"], live_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "seqs vocab"]:
        """See `CausalLM.logits`."""
        ...


@runtime_checkable
class HasDraftHead(Protocol):
    """The further method of a family's class whose checkpoints may hold a head that drafts."""

    @staticmethod
    def draft_head(config: Any, build: BuildContext) -> DraftHead:
        """Build the head of the model of this config, or the head of this config, where it has a folder of its own.

        Raises:
            ValueError: the config asks for a head that is not implemented, or has none.
        """
        ...


@runtime_checkable
class PromptEncoder(Protocol):
    """The NNX module of a family that encodes prompts and generates nothing, such as BERT.

    It is what a `CausalLM` is, with these differences. Its ``layer_groups`` is empty: it keeps no KV, so a prompt is
    computed in one step, and no prefix of it is found later. Its layers attend by `AttendWithinPrompts`. It has no
    ``logits``; users get its hidden states, pooled.
    """

    encodes_prompts: bool
    """True. A class that has it too makes encoders only, whose heads the loader reads; see `MayEncodePrompts` for the
    others."""

    layer_groups: tuple[()]
    vocab_size: int

    longest_prompt: int
    """Most tokens of a prompt: the positions that the model knows."""

    token_types: int
    """Types of tokens that the embedding tells apart (BERT's segments), at least 1. A token of type ``t`` is given as
    its id plus ``t * vocab_size``."""

    def weights(self) -> Iterable[WeightSource]:
        """See `CausalLM.weights`."""
        ...

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """See `CausalLM.locate`."""
        ...

    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        cache: Any,
        attend: Attend,
        live_rows: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        """Return the hidden states of every token, and the cache as it came; see `CausalLM`."""
        ...


@runtime_checkable
class MayEncodePrompts(Protocol):
    """The further method of a family's class that makes a `CausalLM` or, where a config asks for attention in both
    directions, a `PromptEncoder` of the same parameters."""

    @staticmethod
    def encodes(config: Any) -> bool:
        """Tell whether the model of this config is a `PromptEncoder`."""
        ...

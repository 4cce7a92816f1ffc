"""Holds the parts of every decoder: an embedding, a stack of layers, a final norm and the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jpaged.model_api import (
    TENSOR_AXIS,
    Attend,
    AttentionGroup,
    BuildContext,
    CrossAttentionGroup,
    ImageGroup,
    LayerGroup,
    LayerRef,
    PlaceImageFeatures,
    PlaceOnAxes,
    WeightSource,
    padded,
)

from . import weights as convert
from .attention import both_ways
from .layers import LayerNorm, RMSNorm, scaled
from .linear import Embedding, LiveRows, within_vocabulary
from .parameters import constant_param
from .rope import Rotary
from .stack import LayerKind, LayerStack, MakeLayer, Read, Shared


class Decoder(nnx.Module):
    """`jpaged.model_api.CausalLM` for a family whose constructor defines its layers.

    Parameters: embed_tokens [vocab, width]; layers; norm; lm_head [vocab, width] unless tied to the embedding;
    head_bias [vocab] where the family has one.
    A model whose config asks for attention in both directions has no head and is a `jpaged.model_api.PromptEncoder`.
    Layers are called as ``hidden, cache = layer(hidden, shared, cache, ref, attend)``, `shared` being a `Shared`.
    """

    _prefix = "model"
    _embed_name = "embed_tokens"
    _norm_name = "norm"
    _head_name = "lm_head"
    """A checkpoint's names: the prefix of all but the vocabulary's head, the embedding, the final norm and the head."""

    image_group: ImageGroup | CrossAttentionGroup | None = None
    """Layer group of image features, if the model takes images; see `jpaged.model_api.TakesImages`."""

    skips_unread_rows = False
    """True if the layers skip rows of the last one's results that are not read, see
    `jpaged.model_api.SkipsUnreadRows`."""

    _has_experts = False
    """True if the family supports `BuildContext.expert_parallel`."""

    @staticmethod
    def encodes(config: Any) -> bool:
        """See `jpaged.model_api.MayEncodePrompts`; transformers reads ``is_causal`` in the config of any decoder."""
        return not getattr(config, "is_causal", True)

    @staticmethod
    def reach(config: Any) -> int | None:
        """Return how many tokens a local layer of an encoder sees on each side; None = it has no local layers."""
        return getattr(config, "sliding_window", None)

    def __init__(
        self,
        config: Any,
        build: BuildContext,
        kinds: Sequence[LayerKind],
        make_layer: MakeLayer,
        *,
        groups: tuple[LayerGroup, ...],
        rotary: Mapping[str, Rotary | None],
        norm: RMSNorm | LayerNorm | None,
        width: int | None = None,
        embed_factor: float = 1.0,
        logit_scale: float | None = None,
        logit_soft_cap: float | None = None,
        prompt_vocab_size: int | None = None,
        head_bias: bool = False,
    ):
        """Draw random weights; call it inside ``nnx.eval_shape`` for shapes only.

        Args:
            rotary: each group's rotary frequencies, by its name; None for a group that knows no positions.
            width: width of the vocabulary's tables; by default ``config.hidden_size``.
            embed_factor: multiplies the rows of the embedding, see `jpaged.model_api.ScalesEmbedding`.
            logit_scale: multiplies the logits.
            logit_soft_cap: logits become ``logit_soft_cap * tanh(logits / logit_soft_cap)``.
            prompt_vocab_size: rows of the embedding; by default ``config.vocab_size``, the tokens that can be drawn.
            head_bias: whether the vocabulary's head has a bias.

        Raises:
            ValueError: the context asks for expert parallelism of a family without experts, or the config for
                attention in both directions of a family whose layers cannot.
        """
        encodes = self.encodes(config)
        if encodes:
            self._become_encoder(config, groups)
        if build.expert_parallel and not self._has_experts:
            raise ValueError(f"enable_expert_parallel=True, but {type(self).__name__} has no experts")
        rows, columns = padded(config.vocab_size, build.tensor_parallel), width or config.hidden_size
        by_rows = P(TENSOR_AXIS, None)
        self.vocab_size = config.vocab_size
        self.shards = build.tensor_parallel
        self.layer_groups = () if encodes else groups
        self.rotary = tuple(rotary.items())
        self.embed_factor = embed_factor
        self.logit_scale = logit_scale
        self.logit_soft_cap = logit_soft_cap
        self.prompt_vocab_size = prompt_vocab_size or config.vocab_size
        embedded = padded(self.prompt_vocab_size, build.tensor_parallel)
        self.embed_tokens = Embedding(embedded, columns, build, partition=by_rows)
        self.layers = LayerStack(kinds, make_layer, build)
        self.norm = norm
        headless = encodes or config.tie_word_embeddings
        self.lm_head = None if headless else Embedding(rows, columns, build, partition=by_rows)
        self.head_bias = constant_param(build, (rows,)) if head_bias and not encodes else None

    def _become_encoder(self, config: Any, groups: Sequence[LayerGroup]) -> None:
        """Set the attributes of a `jpaged.model_api.PromptEncoder`.

        Raises:
            ValueError: some layers cannot attend in both directions, or the model takes images.
        """
        if hasattr(self, "encode"):
            raise ValueError("is_causal=False is not supported of a model with images")
        for group in groups:
            if not isinstance(group, AttentionGroup) or group.chunk_size is not None or group.readers:
                raise ValueError(f"is_causal=False is not supported: layers of the group {group.name!r} are causal")
        self.encodes_prompts, self.token_types = True, 1
        self.longest_prompt = config.max_position_embeddings
        self._reach = self.reach(config)

    def embed(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], live_rows: LiveRows = None
    ) -> Float[Array, "tokens embed"]:
        """Return the hidden states that enter the first layer."""
        return scaled(self.embed_tokens(tokens), self.embed_factor)

    def shared(self, positions: Int[Array, " tokens"], live_rows: LiveRows) -> Shared:
        """Return the inputs that all layers of a call share."""
        tables = {group: None if rotary is None else rotary.tables(positions) for group, rotary in self.rotary}
        return Shared(tables, live_rows)

    def per_layer(
        self, tokens: Int[Array, " tokens"], hidden: Float[Array, "tokens embed"], live_rows: LiveRows
    ) -> Float[Array, "layers tokens width"] | None:
        """Return each layer's separate input of the tokens, see `Shared.per_layer`; None if there is none.

        Args:
            hidden: what enters the first layer, features of images in their places.
        """
        return None

    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        cache: Any,
        attend: Attend,
        live_rows: LiveRows = None,
        read: Bool[Array, " tokens"] | None = None,
    ) -> tuple[Any, ...]:
        hidden = self.embed(tokens, positions, live_rows)
        places, group = positions, self.image_group
        if isinstance(group, ImageGroup) and group.axes > 1:
            place: PlaceOnAxes = attend  # type: ignore[assignment]  # one callback serves groups of every kind
            cache, places = place(cache, LayerRef(group.name, 0), positions=positions)
        shared = self.shared(places, live_rows)
        if self.layers.stacked:  # XLA:TPU would compute sines in each layer anew, as their angles take less memory
            shared = replace(shared, tables=jax.lax.optimization_barrier(shared.tables))
        if read is not None and live_rows is not None:
            number = jnp.max(jnp.where(read, jnp.arange(1, len(read) + 1, dtype=jnp.int32), 0))
            last = Read(jnp.where(read, positions, -1), jnp.minimum(number, live_rows))
            shared = replace(shared, every=Read(positions, live_rows), read=last, last=self.layers.depth - 1)
        if isinstance(group, ImageGroup):
            take: PlaceImageFeatures = attend  # type: ignore[assignment]  # as above
            cache, hidden = take(cache, LayerRef(group.name, 0), hidden)
            if group.levels > 1:
                none = jnp.zeros_like(hidden)
                added = [take(cache, LayerRef(group.name, level), none)[1] for level in range(1, group.levels)]
                if not any(each is none for each in added):  # some token stands for an image
                    # Read before a layer writes: XLA:GPU would read them where they are added, from a copy of the pool.
                    hidden, added = jax.lax.optimization_barrier((hidden, jnp.stack(added)))
                    shared = replace(shared, added=added)
        shared = replace(shared, per_layer=self.per_layer(tokens, hidden, live_rows))
        if hasattr(self, "encodes_prompts"):
            attend = both_ways(attend, self._reach)
        hidden, cache, *within = self.layers(hidden, shared, cache, attend)
        return (hidden if self.norm is None else self.norm(hidden)), cache, *within

    def logits(self, hidden: Float[Array, "seqs embed"], live_rows: LiveRows = None) -> Float[Array, "seqs vocab"]:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        logits = head.logits(hidden, live_rows)
        if self.head_bias is not None:
            logits = logits + self.head_bias[...].astype(logits.dtype)
        if self.logit_scale is not None:
            logits = self.logit_scale * logits
        if self.logit_soft_cap is not None:
            logits = self.logit_soft_cap * jnp.tanh(logits / self.logit_soft_cap)
        return within_vocabulary(logits, self.vocab_size)

    def head_table(self) -> Float[Array, "vocab embed"] | None:
        """See `jpaged.model_api.HasHeadTable`."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        own = type(self).logits is Decoder.logits  # a family may compute them in another way
        plain = own and self.head_bias is None and self.logit_scale is None and self.logit_soft_cap is None
        return head.array if plain and head.weight.shape[0] == self.vocab_size else None

    def cut(self, layers: int) -> None:
        """See `jpaged.model_api.Cuttable`."""
        self.layers.cut(layers)

    def tap(self, layers: tuple[int, ...]) -> None:
        """See `jpaged.model_api.Tappable`."""
        self.layers.tap(layers)

    def weights(self) -> Iterator[WeightSource]:
        embedded = convert.vocab_rows(self.prompt_vocab_size, self.embed_tokens.weight.shape[0])
        yield from self.embed_tokens.weights(("embed_tokens",), f"{self._prefix}.{self._embed_name}", embedded)
        for number in range(len(self.layers.kinds)):
            yield from self.layers.layer(number).weights(f"{self._prefix}.layers.{self._stored_as(number)}", number)
        if self.norm is not None:
            yield from self.norm.weights(("norm",), f"{self._prefix}.{self._norm_name}")
        rows = convert.vocab_rows(self.vocab_size, padded(self.vocab_size, self.shards))
        if self.lm_head is not None:
            yield from self.lm_head.weights(("lm_head",), self._head_name, rows)
        if self.head_bias is not None:
            yield WeightSource(("head_bias",), (f"{self._head_name}.bias",), rows, P(TENSOR_AXIS))

    def _stored_as(self, number: int) -> int:
        """Return a layer's number in the checkpoint."""
        return number

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        return self.layers.locate(source, "layers")


def check_model_type(config: Any, known: Sequence[str]) -> None:
    """Raise ValueError when the config is another family's."""
    if config.model_type not in known:
        raise ValueError(f"model_type={config.model_type!r} is not one of {', '.join(known)}")

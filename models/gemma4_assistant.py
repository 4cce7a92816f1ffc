"""Gemma 4's assistant, which drafts from the model's own KV (layout: transformers' ``Gemma4AssistantForCausalLM``).

It has a folder of its own. Its layers have queries only: each attends to what the model's last layer of its type keeps.
It reads the embedding of a sequence's newest token, as the model embeds it, next to the model's final state of the
token before. The state it makes takes that one's place for further drafts, whose queries keep the first one's position:
all drafts see the tokens that the model has computed, and no draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import (
    TENSOR_AXIS,
    Attend,
    AttentionGroup,
    BuildContext,
    LayerRef,
    PreviousTokenGroup,
    WeightSource,
    padded,
)

from . import weights as convert
from .gemma4_layer import Gemma4Layer, heads_of_groups
from .groups import kinds_from_types, type_of_group
from .layers import RMSNorm
from .linear import Embedding, Linear, LiveRows, within_vocabulary
from .rope import rotary_from_config
from .stack import LayerKind, LayerStack, Shared
from .token_before import PREVIOUS, take_previous


def is_assistant(config: Any) -> bool:
    """Tell whether a config is an assistant's."""
    return getattr(config, "model_type", None) in ("gemma4_assistant", "gemma4_unified_assistant")


class Gemma4AssistantHead(nnx.Module):
    """`jpaged.model_api.DraftHead`; `config` is a Hugging Face ``Gemma4AssistantConfig``, whose ``text_config``
    describes the layers; transformers refuses one with experts, own inputs of layers or KV.

    Parameters: embed_tokens [vocab, target width], the model's; pre_projection [2 * target width, width]; layers; norm
    [width]; lm_head [vocab, width]; post_projection [width, target width]. With ordered embeddings also centroids
    [width, centroids] and cluster_ids [vocab], the cluster of each token: only tokens of the clusters whose centroids
    score best can be drafted.

    Attributes:
        reads: see `jpaged.model_api.DraftHead`.

    Raises:
        ValueError: the config asks for another layout.
    """

    tables: ClassVar[tuple[str, ...]] = ("embed_tokens",)
    block: ClassVar[None] = None

    def __init__(self, config: Any, build: BuildContext):
        text = config.get_text_config()
        if build.expert_parallel:
            raise ValueError("enable_expert_parallel=True, but an assistant has no experts")
        kinds = tuple(replace(kind, shares_kv=True) for kind in kinds_from_types(text))
        heads = heads_of_groups(text, kinds, build)
        if "window" in heads and text.sliding_window < 2:
            raise ValueError(f"sliding_window={text.sliding_window} must be at least 2: no query sees its own token")
        self.reads = tuple(
            AttentionGroup(
                name,
                (),
                own.layout.kv_heads,
                own.head_dim,
                sliding_window=text.sliding_window if name == "window" else None,
            )
            for name, own in heads.items()
        )
        size, eps, self.vocab_size = text.hidden_size, text.rms_norm_eps, text.vocab_size
        self.size, self.states, self.shards = size, config.backbone_hidden_size, build.tensor_parallel
        # One number more: how many drafts a state is of, 0 = it is the model's.
        kept = PreviousTokenGroup(PREVIOUS, (0,), self.states + 1, np.dtype(build.dtype).name)
        self.layer_groups = (kept,)
        self.rotary = tuple(
            (name, rotary_from_config(text, own.head_dim, type_of_group(name))) for name, own in heads.items()
        )

        def make(kind: LayerKind, build: BuildContext) -> Gemma4Layer:
            return Gemma4Layer(text, kind, heads[kind.group or ""], None, build)

        rows, by_rows, whole = padded(self.vocab_size, self.shards), P(TENSOR_AXIS, None), P(None, None)
        self.embed_tokens = Embedding(rows, self.states, build, partition=by_rows)
        self.pre_projection = Linear(2 * self.states, size, build, partition=whole)
        self.layers = LayerStack(kinds, make, build)
        self.norm = RMSNorm(size, eps, build)
        self.lm_head = Embedding(rows, size, build, partition=by_rows)
        self.post_projection = Linear(size, self.states, build, partition=whole)
        self.num_centroids = config.num_centroids
        self.clusters_seen = config.centroid_intermediate_top_k
        ordered = config.use_ordered_embeddings
        if ordered and (self.vocab_size % self.num_centroids or not 0 < self.clusters_seen <= self.num_centroids):
            raise ValueError(
                f"num_centroids={self.num_centroids} must divide vocab_size={self.vocab_size} and be at least "
                f"centroid_intermediate_top_k={self.clusters_seen}, which must be positive"
            )
        self.centroids = Linear(size, self.num_centroids, build, partition=whole) if ordered else None
        self.cluster_ids = nnx.Param(jnp.zeros(rows, jnp.int32)) if ordered else None

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """See `jpaged.model_api.DraftHead`."""
        return ()

    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        cache: Any,
        attend: Attend,
        live_rows: LiveRows = None,
        *,
        target: Float[Array, "tokens states"] | None = None,
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        """Return the final-norm hidden states of every token and the updated cache; see `DraftHead` for `target`.

        Where there is a `target` it is kept, and nothing is computed: the hidden states mean nothing.
        """
        if target is not None:
            cache, _ = take_previous(cache, attend, jnp.pad(target, ((0, 0), (0, 1))))
            return jnp.zeros((len(tokens), self.size), target.dtype), cache
        embedded = self.embed_tokens(tokens)
        embedded = embedded * jnp.asarray(self.states**0.5, embedded.dtype)
        cache, before = take_previous(cache, attend, jnp.zeros((len(tokens), self.states + 1), embedded.dtype))
        before, drafts = before[:, :-1], before[:, -1]
        computed = positions - drafts.astype(jnp.int32)  # tokens of the sequence, which is the first query's position
        hidden = self.pre_projection(jnp.concatenate([embedded, before], axis=-1), live_rows)
        shared = Shared({name: rotary.tables(computed) for name, rotary in self.rotary}, live_rows)
        hidden, cache = self.layers(hidden, shared, cache, _of_model(attend, computed))
        hidden = self.norm(hidden)
        after = jnp.concatenate([self.post_projection(hidden, live_rows), (drafts + 1)[:, None]], axis=-1)
        cache, _ = take_previous(cache, attend, after)
        return hidden, cache

    def logits(self, hidden: Float[Array, "seqs embed"], live_rows: LiveRows = None) -> Float[Array, "seqs vocab"]:
        """Return logits of the model's tokens, -inf of those that cannot be drafted.

        All tokens are scored, also where few can be drafted: the table is small, and its rows lie on several devices.
        """
        logits = self.lm_head.logits(hidden, live_rows)
        if self.centroids is not None and self.cluster_ids is not None:
            _, best = jax.lax.top_k(self.centroids(hidden, live_rows), self.clusters_seen)
            seqs = jnp.arange(len(hidden))[:, None]
            among = jnp.zeros((len(hidden), self.num_centroids), bool).at[seqs, best].set(True)
            logits = jnp.where(jnp.take(among, self.cluster_ids[...], axis=1), logits, -jnp.inf)
        return within_vocabulary(logits, self.vocab_size)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters but the model's table."""
        size, states = self.size, self.states
        yield from self.pre_projection.weights(
            ("pre_projection",), ("pre_projection",), None, convert.linear(2 * states, size)
        )
        for number in range(len(self.layers.kinds)):
            yield from self.layers.layer(number).weights(f"model.layers.{number}", number)
        yield from self.norm.weights(("norm",), "model.norm")
        rows = convert.vocab_rows(self.vocab_size, self.lm_head.weight.shape[0])
        yield from self.lm_head.weights(("lm_head",), "model.embed_tokens", rows)  # one table, of either name
        yield from self.post_projection.weights(
            ("post_projection",), ("post_projection",), None, convert.linear(size, states)
        )
        if self.centroids is not None:
            centroids = convert.linear(size, self.num_centroids)
            yield from self.centroids.weights(("centroids",), ("masked_embedding.centroids",), None, centroids)
            yield WeightSource(("cluster_ids",), ("masked_embedding.token_ordering",), self._cluster_ids, P(None))

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """See `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")

    def _cluster_ids(self, order: np.ndarray) -> Int[np.ndarray, " vocab"]:
        """Return each token's cluster, of the tokens in the clusters' order.

        Raises:
            ValueError: it does not name each token once.
        """
        tokens = order.astype(np.int64)
        if tokens.shape != (self.vocab_size,) or (np.sort(tokens) != np.arange(self.vocab_size)).any():
            raise ValueError(f"token_ordering of {order.shape} does not name each of {self.vocab_size} tokens once")
        found = np.zeros(self.lm_head.weight.shape[0], np.int32)
        found[tokens] = np.arange(self.vocab_size) // (self.vocab_size // self.num_centroids)
        return found


def _of_model(attend: Attend, computed: Int[Array, " tokens"]) -> Attend:
    """Return `attend` for layers that read what the model keeps of the tokens it has computed."""

    def read(cache: Any, layer: LayerRef, q: Array, k: None, v: None, **options: Any) -> tuple[Any, Array]:
        return attend(cache, replace(layer, of_model=True), q, k, v, seen=computed, **options)

    return read  # type: ignore[return-value]

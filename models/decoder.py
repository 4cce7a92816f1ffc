"""What every decoder is made of: an embedding, a stack of layers, a final norm and the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import TENSOR_AXIS, Attend, LayerGroup, WeightSource, padded

from . import weights as convert
from .layers import LayerNorm, RMSNorm, embed, random_param, vocab_logits
from .rope import Rotary
from .stack import LayerKind, LayerStack


class Decoder(nnx.Module):
    """`jpaged.model_api.CausalLM` for a family that says in its constructor what its layers are.

    Parameters: embed_tokens [vocab, width]; layers; norm; lm_head [vocab, width] unless tied to the embedding.
    Layers are given what `shared` returns, and take their group's.
    """

    _prefix = "model"
    _norm_name = "norm"
    """Names in a checkpoint: of all but the vocabulary's head, and of the final norm."""

    def __init__(
        self,
        config: Any,
        kinds: Sequence[LayerKind],
        make_layer: Callable[[LayerKind, nnx.Rngs], nnx.Module],
        *,
        groups: tuple[LayerGroup, ...],
        rotary: Mapping[str, Rotary | None],
        norm: RMSNorm | LayerNorm | None,
        width: int | None = None,
        logit_scale: float | None = None,
        logit_soft_cap: float | None = None,
        dtype: jnp.dtype,
        tensor_parallel: int,
        stacked: bool,
        rngs: nnx.Rngs,
    ):
        """Random weights.

        Args:
            rotary: of each group, by its name.
            width: of the vocabulary's tables; by default ``config.hidden_size``.
        """
        table = padded(config.vocab_size, tensor_parallel), width or config.hidden_size
        self.vocab_size = config.vocab_size
        self.dtype = dtype
        self.layer_groups = groups
        self.rotary = tuple(rotary.items())
        self.logit_scale = logit_scale
        self.logit_soft_cap = logit_soft_cap
        self.embed_tokens = random_param(rngs, table, dtype)
        self.layers = LayerStack(kinds, make_layer, stacked=stacked, rngs=rngs)
        self.norm = norm
        self.lm_head = None if config.tie_word_embeddings else random_param(rngs, table, dtype)

    def embed(self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"]) -> Float[Array, "tokens embed"]:
        """What enters the first layer."""
        return embed(self.embed_tokens[...], tokens, self.dtype)

    def shared(self, positions: Int[Array, " tokens"]) -> dict[str, Any]:
        """Of each group, the rotary tables; None where nothing is rotated."""
        return {group: None if rotary is None else rotary.tables(positions) for group, rotary in self.rotary}

    def __call__(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], cache: Any, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        hidden, cache = self.layers(self.embed(tokens, positions), self.shared(positions), cache, attend)
        return (hidden if self.norm is None else self.norm(hidden)), cache

    def logits(self, hidden: Float[Array, "seqs embed"]) -> Float[Array, "seqs vocab"]:
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        return vocab_logits(hidden, table[...], self.vocab_size, self.logit_scale, self.logit_soft_cap)

    def weights(self) -> Iterator[WeightSource]:
        rows = convert.vocab_rows(self.vocab_size, self.embed_tokens.shape[0])
        by_rows = P(TENSOR_AXIS, None)
        embedding = f"{self._prefix}.embed_tokens.weight"
        yield WeightSource(("embed_tokens",), (embedding,), rows, by_rows, contracted=-1)
        for number in range(len(self.layers.kinds)):
            yield from self.layers.layer(number).weights(f"{self._prefix}.layers.{number}", number)
        if self.norm is not None:
            yield from self.norm.weights(("norm",), f"{self._prefix}.{self._norm_name}")
        if self.lm_head is not None:
            yield WeightSource(("lm_head",), ("lm_head.weight",), rows, by_rows, contracted=-1)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        return self.layers.locate(source, "layers")


def check_model_type(config: Any, known: Sequence[str]) -> None:
    """Raises ValueError when the config is of another family."""
    if config.model_type not in known:
        raise ValueError(f"model_type={config.model_type!r} is not one of {', '.join(known)}")

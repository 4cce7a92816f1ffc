"""The head that predicts the token after the next (multi-token prediction; DeepSeek-V3, 2024, section 2.2).

At position ``p`` it reads the token there and the model's hidden state of the token before, and its result predicts
token ``p + 1`` (`token_before` says what that asks of the pool).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jpaged.model_api import Attend, AttentionGroup, BuildContext, WeightSource, padded

from . import weights as convert
from .decoder import Decoder
from .layers import RMSNorm
from .linear import Linear, LiveRows
from .rope import Rotary
from .stack import LayerKind, MakeLayer
from .token_before import LayerMemory, memory_of_head, take_previous, without_first


@dataclass(frozen=True)
class HeadNames:
    """A checkpoint's names of a head's parts; the defaults are Qwen's.

    Attributes:
        tables: attributes and names of the embedding and the vocabulary's head, where the head has its own. Names are
            part of a module, which is hashed to find compiled programs.
    """

    fc: str = "mtp.fc"
    embedding_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    layer: str = "mtp.layers.0"
    norm: str = "mtp.norm"
    tables: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_further_layer(cls, config: Any) -> HeadNames:
        """Return the names of a head that is stored as one more layer of the model (DeepSeek-V3, GLM-4.5)."""
        layer = f"model.layers.{config.num_hidden_layers}"
        fc, embedding_norm, hidden_norm = (f"{layer}.{name}" for name in ("eh_proj", "enorm", "hnorm"))
        tables = (("embed_tokens", f"{layer}.embed_tokens"), ("lm_head", f"{layer}.shared_head.head"))
        return cls(fc, embedding_norm, hidden_norm, layer, f"{layer}.shared_head.norm", tables)


class PredictionHead(Decoder):
    """`jpaged.model_api.DraftHead` of one layer; the model's embedding and head are its own too, unless the checkpoint
    has others.

    Parameters: fc [2 * width, width]; embedding_norm, hidden_norm [width]; layers; norm; and the tables.

    Args:
        memory: what the layer keeps in a model that it is a layer of.
        variant: the layer's, see `LayerKind`.
        rotary: rotates the layer's queries and keys.
        norm_offset: see `RMSNorm`.
    """

    tables: ClassVar[tuple[str, ...]] = ("embed_tokens", "lm_head")
    reads: ClassVar[tuple[AttentionGroup, ...]] = ()
    block: ClassVar[None] = None
    _has_experts = True

    def __init__(
        self,
        config: Any,
        build: BuildContext,
        make_layer: MakeLayer,
        *,
        memory: LayerMemory,
        variant: Any,
        rotary: Rotary,
        names: HeadNames,
        norm_offset: float = 0.0,
    ):
        check_one_head(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(
            config,
            build,
            (LayerKind("full", variant),),
            make_layer,
            groups=memory_of_head(memory, size, build),
            rotary={"full": rotary},
            norm=RMSNorm(size, eps, build, offset=norm_offset),
        )
        self.embedding_norm = RMSNorm(size, eps, build, offset=norm_offset)
        self.hidden_norm = RMSNorm(size, eps, build, offset=norm_offset)
        self.fc = Linear(2 * size, size, build, partition=P(None, None))
        self.size = self.states = size
        self.names = names

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
        read: Bool[Array, " tokens"] | None = None,
        target: Float[Array, "tokens embed"] | None = None,
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        """Return the final-norm hidden states of every token and the updated cache; see `DraftHead` for `target`."""
        del read
        embedded = self.embed(tokens, positions, live_rows)
        kept = jnp.zeros_like(embedded) if target is None else target
        cache, before = take_previous(cache, attend, kept)
        joined = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(before)], axis=-1)
        # Published code counts from the first hidden state, which is joined with the second token.
        shared = self.shared(jnp.maximum(positions - 1, 0), live_rows)
        hidden, cache = self.layers(self.fc(joined, live_rows), shared, cache, without_first(attend, positions))
        assert self.norm is not None
        hidden = self.norm(hidden)
        if target is None:  # the next draft's head goes on from this one's state
            cache, _ = take_previous(cache, attend, hidden)
        return hidden, cache

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters; those of the tables where the checkpoint may have them."""
        size, names = self.size, self.names
        for table, name in names.tables:
            held = getattr(self, table)
            if held is not None:
                rows = convert.vocab_rows(self.vocab_size, padded(self.vocab_size, self.shards))
                yield from held.weights((table,), name, rows)
        yield from self.fc.weights(("fc",), (names.fc,), None, convert.linear(2 * size, size))
        yield from self.embedding_norm.weights(("embedding_norm",), names.embedding_norm)
        yield from self.hidden_norm.weights(("hidden_norm",), names.hidden_norm)
        yield from self.layers.layer(0).weights(names.layer, 0)
        assert self.norm is not None
        yield from self.norm.weights(("norm",), names.norm)


def check_one_head(config: Any) -> None:
    """Raise ValueError unless a config describes one head: it may not say so, as all published ones do not."""
    for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        number = getattr(config, name, None)
        if number is not None and number != 1:
            raise ValueError(f"{name}={number} is not supported; only 1 layer that predicts further tokens")

"""The head that predicts the token after the next (multi-token prediction; DeepSeek-V3, 2024, section 2.2).

At position ``p`` it reads the token there and the model's hidden state of the token before, and its result predicts
token ``p + 1``. So what it keeps of a position depends on tokens up to there only, as the model's own KV does, and is
found in the prefix cache, swapped and forked with it. Published code counts from the hidden states instead, whose first
one is joined with the second token: the head has no entry of the first token, whose position here no query may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jpaged.model_api import Attend, AttentionGroup, BuildContext, LayerRef, Recur, StateGroup, StatePart, WeightSource
from pallas_kernels.recurrent import causal_conv

from . import weights as convert
from .attention import Heads
from .decoder import Decoder
from .layers import RMSNorm
from .linear import Linear, LiveRows
from .rope import Rotary
from .stack import LayerKind, MakeLayer

_BEFORE = "hidden"
"""The layer group, and its one part, that keeps the model's hidden state of a sequence's newest token."""
_MARK, _AGAINST = 16.0, -1e4
"""The first token's key has the one where others have 0, and queries have the other there; both fit in float16. Their
product, scaled, is so far below other scores that its exponential is 0 in float32."""


class PredictionHead(Decoder):
    """`jpaged.model_api.DraftHead` of one layer of full attention; the model's embedding and head are its own too.

    Parameters: fc [2 * width, width]; embedding_norm, hidden_norm [width]; layers; norm; and the model's tables.

    Args:
        heads: those of the layer's attention.
        variant: the layer's, see `LayerKind`.
        rotary: rotates the layer's queries and keys.
        norm_offset: see `RMSNorm`.

    Raises:
        ValueError: the width does not divide over the tensor shards, which each keep a part of the hidden state.
    """

    tables: ClassVar[tuple[str, ...]] = ("embed_tokens", "lm_head")
    _name = "mtp"
    _has_experts = True

    def __init__(
        self,
        config: Any,
        build: BuildContext,
        make_layer: MakeLayer,
        *,
        heads: Heads,
        variant: Any,
        rotary: Rotary,
        norm_offset: float,
    ):
        size, eps = config.hidden_size, config.rms_norm_eps
        if size % build.tensor_parallel:
            raise ValueError(f"hidden_size={size} does not divide over tensor_parallel_size={build.tensor_parallel}")
        layout = heads.layout
        attention = AttentionGroup("full", (0,), layout.kv_heads, heads.head_dim + 1, q_per_kv=layout.q_per_kv)
        before = StatePart(_BEFORE, (size, 1), np.dtype(build.dtype).name)
        super().__init__(
            config,
            build,
            (LayerKind("full", variant),),
            make_layer,
            groups=(attention, StateGroup(_BEFORE, (0,), (before,))),
            rotary={"full": rotary},
            norm=RMSNorm(size, eps, build, offset=norm_offset),
        )
        self.embedding_norm = RMSNorm(size, eps, build, offset=norm_offset)
        self.hidden_norm = RMSNorm(size, eps, build, offset=norm_offset)
        self.fc = Linear(2 * size, size, build, partition=P(None, None))
        self.size = size

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
        cache, before = _one_later(cache, attend, kept)
        joined = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(before)], axis=-1)
        # Published code counts from the first hidden state, which is joined with the second token.
        shared = self.shared(jnp.maximum(positions - 1, 0), live_rows)
        hidden, cache = self.layers(self.fc(joined, live_rows), shared, cache, _without_first(attend, positions))
        assert self.norm is not None
        hidden = self.norm(hidden)
        if target is None:  # the next draft's head goes on from this one's state
            cache, _ = _one_later(cache, attend, hidden)
        return hidden, cache

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters but the model's tables."""
        size, name = self.size, self._name
        yield from self.fc.weights(("fc",), (f"{name}.fc",), None, convert.linear(2 * size, size))
        yield from self.embedding_norm.weights(("embedding_norm",), f"{name}.pre_fc_norm_embedding")
        yield from self.hidden_norm.weights(("hidden_norm",), f"{name}.pre_fc_norm_hidden")
        yield from self.layers.layer(0).weights(f"{name}.layers.0", 0)
        assert self.norm is not None
        yield from self.norm.weights(("norm",), f"{name}.norm")


def _one_later(
    cache: Any, attend: Attend, hidden: Float[Array, "tokens embed"]
) -> tuple[Any, Float[Array, "tokens embed"]]:
    """Return for each token what `hidden` is for the token before it, 0 for a sequence's first one; the newest token's
    is kept for the next step."""
    recur: Recur = attend  # type: ignore[assignment]  # one callback serves layers of every kind
    ones = jnp.ones(hidden.shape[1], hidden.dtype)
    weight = jnp.stack([ones, jnp.zeros_like(ones)], axis=1)
    cache, before = recur(
        cache, LayerRef(_BEFORE, 0), _BEFORE, causal_conv, hidden, weight, None, axes=(1, 0, None), out_axis=1
    )
    return cache, before.astype(hidden.dtype)


def _without_first(attend: Attend, positions: Int[Array, " tokens"]) -> Attend:
    """Return `attend` for queries that do not see their sequence's first token.

    Keys are one number wider: it is `_MARK` in the first token's, whose others are 0, and 0 in all others; queries have
    `_AGAINST` there. So no kernel has a mask for it, and a key that is kept in few bits hides as well.
    """

    def seeing_the_rest(
        cache: Any, layer: LayerRef, q: Array, k: Array, v: Array, *, scale: float, **options: Any
    ) -> tuple[Any, Array]:
        if options.get("soft_cap") is not None:
            raise ValueError("a head that drafts takes no soft cap of scores, which would show it its first token")
        first = (positions == 0)[:, None, None]
        mark = _MARK * jnp.broadcast_to(first, (*k.shape[:-1], 1)).astype(k.dtype)
        keys = jnp.concatenate([jnp.where(first, 0, k), mark], axis=-1)
        values = jnp.pad(jnp.where(first, 0, v), ((0, 0), (0, 0), (0, 1)))
        queries = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=_AGAINST)
        cache, mixed = attend(cache, layer, queries, keys, values, scale=scale, **options)
        return cache, mixed[..., :-1]

    return seeing_the_rest  # type: ignore[return-value]


def check_one_head(config: Any) -> None:
    """Raise ValueError unless a config describes one head: it may not say so, as all published ones do not."""
    for field in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        number = getattr(config, field, None)
        if number is not None and number != 1:
            raise ValueError(f"{field}={number} is not supported; only 1 layer that predicts further tokens")

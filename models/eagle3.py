"""EAGLE-3's head, which drafts from hidden states within a model (Li et al., 2025, arXiv 2503.01840).

It has a folder of its own. The states that enter some of the model's layers are joined to one of the model's width, by
``fc``; one layer reads it next to the token that comes after, and its result takes the state's place for further
drafts. Its vocabulary is a part of the model's. `token_before` says how entries are counted, and why no query sees the
first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

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
    WeightSource,
    padded,
)

from . import weights as convert
from .attention import Attention, Heads
from .layers import GatedMLP, RMSNorm, check_activation
from .linear import Embedding, Linear, LiveRows, within_vocabulary
from .rope import rotary_from_config
from .stack import Shared
from .token_before import memory_of_head, take_previous, without_first

_OTHER_LAYOUTS = {
    "attention_bias": False,
    "mlp_bias": False,
    "logit_scale": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Fields that change the head, those of NVIDIA's ModelOpt too, with the only value that is supported, which they have
where a config says nothing."""


def _fields(config: Any) -> dict[str, Any]:
    """Return a head's own fields, those of ``eagle_config`` (NVIDIA's heads) among them: `_OTHER_LAYOUTS`, and the
    norms that a head may have, as vLLM reads them."""
    names = (*_OTHER_LAYOUTS, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    said = {name: getattr(config, name, None) for name in names} | (getattr(config, "eagle_config", None) or {})
    return {name: value for name, value in said.items() if value is not None}


def is_eagle3_head(config: Any) -> bool:
    """Tell whether a config is an EAGLE-3 head's."""
    return any("Eagle3" in name for name in getattr(config, "architectures", None) or ())


class Eagle3Head(nnx.Module):
    """`jpaged.model_api.DraftHead` of one layer of full attention; `config` is a Hugging Face ``LlamaConfig`` with
    ``draft_vocab_size``.

    Parameters: fc [taps * target width, width]; input_norm (of embeddings), hidden_norm, post_norm, norm [width];
    attention, whose input is both normed; mlp; lm_head [draft vocab, width]; draft_ids [vocab], the row of each token
    in it, -1 = none; embed_tokens [vocab, width], the model's unless the folder has one. With ``norm_before_fc`` also
    joined_norm [taps * target width], with ``fc_norm`` state_norms [target width], one of each state, before ``fc``.

    Raises:
        ValueError: the config asks for another layout or number of layers.
    """

    tables: ClassVar[tuple[str, ...]] = ("embed_tokens",)
    reads: ClassVar[tuple[AttentionGroup, ...]] = ()
    block: ClassVar[None] = None

    def __init__(self, config: Any, build: BuildContext):
        if build.expert_parallel:
            raise ValueError("enable_expert_parallel=True, but an EAGLE-3 head has no experts")
        own = {"num_hidden_layers": config.num_hidden_layers, **_fields(config)}
        for name, only in {"num_hidden_layers": 1, **_OTHER_LAYOUTS}.items():
            if own.get(name, only) != only:
                raise ValueError(f"{name}={own[name]} is not supported of an EAGLE-3 head; only {only}")
        size, eps, self.vocab_size = config.hidden_size, config.rms_norm_eps, config.vocab_size
        self.draft_vocab_size = getattr(config, "draft_vocab_size", None) or config.vocab_size
        heads = Heads.of_config(config, build)
        layout = heads.layout
        memory = AttentionGroup("full", (0,), layout.kv_heads, heads.head_dim, q_per_kv=layout.q_per_kv)
        self.layer_groups = memory_of_head(memory, size, build)
        self.rotary = rotary_from_config(config, heads.head_dim, longest=build.longest)
        # Next to the other fields they are layers that states enter, as in vLLM; ModelOpt names those that they leave.
        self.given_taps = tuple(getattr(config, "eagle_aux_hidden_state_layer_ids", None) or ()) or tuple(
            layer + 1 for layer in own.get("eagle_aux_hidden_state_layer_ids") or ()
        )
        target = getattr(config, "target_hidden_size", None) or size
        number = len(self.given_taps or (0, 0, 0))
        self.states = number * target
        self.size, self.shards = size, build.tensor_parallel
        self.adds_normed, self.hands_on_normed = (
            bool(own.get(name)) for name in ("norm_before_residual", "norm_output")
        )

        by_rows = P(TENSOR_AXIS, None)
        self.embed_tokens = Embedding(padded(self.vocab_size, self.shards), size, build, partition=by_rows)
        self.joined_norm = RMSNorm(self.states, eps, build) if own.get("norm_before_fc") else None
        self.state_norms = nnx.List(RMSNorm(target, eps, build) for _ in range(number if own.get("fc_norm") else 0))
        self.fc = Linear(self.states, size, build, partition=P(None, None))
        self.input_norm, self.hidden_norm = RMSNorm(size, eps, build), RMSNorm(size, eps, build)
        self.attention = Attention(size, heads, build, scale=heads.head_dim**-0.5, inputs=2 * size)
        self.post_norm = RMSNorm(size, eps, build)
        activation = check_activation(config.hidden_act, "hidden_act")
        self.mlp = GatedMLP(size, config.intermediate_size, activation, build, bias=False)
        self.norm = RMSNorm(size, eps, build)
        self.lm_head = Embedding(padded(self.draft_vocab_size, self.shards), size, build, partition=by_rows)
        chooses = self.draft_vocab_size != self.vocab_size
        self.draft_ids = nnx.Param(jnp.zeros(self.embed_tokens.weight.shape[0], jnp.int32)) if chooses else None

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """See `jpaged.model_api.DraftHead`."""
        return self.given_taps or (2, num_layers // 2, num_layers - 3)

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
        """Return the final-norm hidden states of every token and the updated cache; see `DraftHead` for `target`."""
        embedded = self.embed_tokens(tokens)
        kept = jnp.zeros_like(embedded) if target is None else self.fc(self._normed(target), live_rows)
        cache, before = take_previous(cache, attend, kept)
        normed = self.hidden_norm(before)
        joined = jnp.concatenate([self.input_norm(embedded), normed], axis=-1)
        shared = Shared({"full": self.rotary.tables(jnp.maximum(positions - 1, 0))}, live_rows)
        within = without_first(attend, positions)
        mixed, cache = self.attention(joined, shared, cache, LayerRef("full", 0), within)
        hidden = (normed if self.adds_normed else before) + mixed
        hidden = hidden + self.mlp(self.post_norm(hidden), live_rows)
        out = self.norm(hidden)
        if target is None:  # the next draft's layer reads this state in the place of a joined one
            cache, _ = take_previous(cache, attend, out if self.hands_on_normed else hidden)
        return out, cache

    def _normed(self, target: Float[Array, "tokens states"]) -> Float[Array, "tokens states"]:
        """Return the model's states as ``fc`` takes them."""
        if self.joined_norm is not None:
            target = self.joined_norm(target)
        if not self.state_norms:
            return target
        each = jnp.split(target, len(self.state_norms), axis=-1)
        return jnp.concatenate([norm(x) for norm, x in zip(self.state_norms, each, strict=True)], axis=-1)

    def logits(self, hidden: Float[Array, "seqs embed"], live_rows: LiveRows = None) -> Float[Array, "seqs vocab"]:
        """Return logits of the model's tokens, -inf of those that are not in the head's vocabulary."""
        logits = self.lm_head.logits(hidden, live_rows)
        if self.draft_ids is not None:
            ids = self.draft_ids[...]
            return jnp.where(ids >= 0, jnp.take(logits, jnp.maximum(ids, 0), axis=1), -jnp.inf)
        return within_vocabulary(logits, self.vocab_size)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        size, layer = self.size, "midlayer"
        rows = convert.vocab_rows(self.vocab_size, self.embed_tokens.weight.shape[0])
        yield from self.embed_tokens.weights(("embed_tokens",), "embed_tokens", rows)
        if self.joined_norm is not None:
            yield from self.joined_norm.weights(("joined_norm",), "input_norm")
        for number, norm in enumerate(self.state_norms):
            place: Any = ("state_norms", number)
            yield from norm.weights(place, f"fc_norm.{number}")
        yield from self.fc.weights(("fc",), ("fc",), None, convert.linear(self.states, size))
        yield from self.input_norm.weights(("input_norm",), f"{layer}.input_layernorm")
        yield from self.hidden_norm.weights(("hidden_norm",), f"{layer}.hidden_norm")
        yield from self.attention.weights(("attention",), f"{layer}.self_attn", None)
        yield from self.post_norm.weights(("post_norm",), f"{layer}.post_attention_layernorm")
        yield from self.mlp.weights(("mlp",), f"{layer}.mlp", None)
        yield from self.norm.weights(("norm",), "norm")
        own = convert.vocab_rows(self.draft_vocab_size, self.lm_head.weight.shape[0])
        yield from self.lm_head.weights(("lm_head",), "lm_head", own)
        if self.draft_ids is not None:
            yield WeightSource(("draft_ids",), ("d2t",), self._draft_ids, P(None))

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """See `jpaged.model_api.CausalLM.locate`."""
        return source.path, None

    def _draft_ids(self, offsets: np.ndarray) -> Int[np.ndarray, " vocab"]:
        """Return each token's row of the head's table, from ``d2t``, by which each row's token exceeds the row's
        number.

        Raises:
            ValueError: there are not as many rows as the config says, or tokens that the model has not.
        """
        if offsets.shape != (self.draft_vocab_size,):
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} in the config, but d2t is of {offsets.shape}")
        rows = np.arange(len(offsets))
        ids = rows + offsets.astype(np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"tokens {ids.min()}..{ids.max()} are not in the model's vocabulary of {self.vocab_size}")
        found = np.full(self.embed_tokens.weight.shape[0], -1, np.int32)
        found[ids] = rows
        return found

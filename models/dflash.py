"""DFlash's drafter, which denoises a block of drafts at once (2026, arXiv 2602.06036; layout: ``DFlashDraftModel``).

It has a folder of its own. A block is a sequence's newest token and a mask for each draft, which see one another and
all tokens before them. Of those a layer's keys and values are projected from the model's own states, which `fc` joins:
they are filled in as the model computes its tokens, and no layer of the drafter runs over them. What leaves a mask is
the draft in its place, not the one after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import (
    TENSOR_AXIS,
    Attend,
    AttentionGroup,
    BuildContext,
    DraftBlock,
    LayerRef,
    WeightSource,
    padded,
)

from . import weights as convert
from .attention import Attention, Heads
from .groups import kinds_from_types, layer_groups
from .layers import GatedMLP, RMSNorm, check_activation, scaled
from .linear import Embedding, Linear, LiveRows, within_vocabulary
from .rope import rotary_from_config
from .stack import LayerKind, LayerStack, Shared

_OTHER_LAYOUTS: dict[str, Any] = {
    "attention_sink_bias": False,
    "attention_value_scale": None,
    "causal": False,
    "use_aux_hidden_state": True,
    "use_swa": False,
}
"""Fields of ``dflash_config`` that change the layers, with the only value that is supported."""
_OTHER_FIELDS: dict[str, Any] = {
    "add_swa_attention_sink_bias": False,
    "is_causal": False,
    "is_neox_style": True,
    "logit_scale": 1,
    "use_aux_hidden_state": True,
}
"""Such fields of the config itself."""


def is_dflash_drafter(config: Any) -> bool:
    """Tell whether a config is a DFlash drafter's, of this layout or a later one."""
    return any("DFlash" in name for name in getattr(config, "architectures", None) or ())


@dataclass(frozen=True)
class _Filling(Shared):
    """Says that layers only keep keys and values of what enters the stack."""


class DFlashLayer(nnx.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``, or nothing but the keys and values of `x` (see `_Filling`)."""

    def __init__(self, config: Any, heads: Heads, build: BuildContext):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, build)
        self.attention = Attention(
            size,
            heads,
            build,
            scale=heads.head_dim**-0.5,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            qk_norm=partial(RMSNorm, heads.head_dim, eps, build),
        )
        self.post_norm = RMSNorm(size, eps, build)
        activation = check_activation(config.hidden_act, "hidden_act")
        self.mlp = GatedMLP(size, config.intermediate_size, activation, build, bias=False)

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        if isinstance(shared, _Filling):
            _, cache = self.attention(hidden, shared, cache, ref, attend)
            return hidden, cache
        mixed, cache = self.attention(self.input_norm(hidden), shared, cache, ref, attend)
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_norm(hidden), shared.live_rows), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.input_norm.weights(("input_norm",), f"{name}.input_layernorm", layer)
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        yield from self.post_norm.weights(("post_norm",), f"{name}.post_attention_layernorm", layer)
        yield from self.mlp.weights(("mlp",), f"{name}.mlp", layer)


class DFlashHead(nnx.Module):
    """`jpaged.model_api.DraftHead` of layers like Qwen3's; `config` is a ``Qwen3Config`` with ``block_size`` and
    ``dflash_config``.

    Parameters: fc [taps * width, width]; hidden_norm [width], of what it joins; layers; norm [width]; embed_tokens and
    lm_head [vocab, width], the model's unless the folder has others.

    Attributes:
        block: see `jpaged.model_api.DraftHead`.
        embed_factor: see `jpaged.model_api.ScalesEmbedding`.
        head_bias: see `jpaged.model_api.HasHeadBias`.

    Raises:
        ValueError: the config asks for another layout, or lacks a field.
    """

    tables: ClassVar[tuple[str, ...]] = ("embed_tokens", "lm_head")
    reads: ClassVar[tuple[AttentionGroup, ...]] = ()

    def __init__(self, config: Any, build: BuildContext):
        if build.expert_parallel:
            raise ValueError("enable_expert_parallel=True, but a DFlash drafter has no experts")
        own = _checked(config)
        size, eps, self.vocab_size = config.hidden_size, config.rms_norm_eps, config.vocab_size
        self.block = DraftBlock(own["mask_token_id"], config.block_size)
        self.after = tuple(own["target_layer_ids"])
        self.size, self.states, self.shards = size, len(self.after) * size, build.tensor_parallel
        self.embed_factor = 1.0
        self.head_bias: nnx.Param | None = nnx.data(None)
        heads = Heads.of_config(config, build)
        kinds = kinds_from_types(config)
        if any(kind.group != "full" for kind in kinds):
            raise ValueError(f"layer_types={config.layer_types}: only full attention is supported of a DFlash drafter")
        self.layer_groups = layer_groups(kinds, heads.layout.kv_heads, heads.head_dim, q_per_kv=heads.layout.q_per_kv)
        self.rotary = rotary_from_config(config, heads.head_dim, longest=build.longest)

        def make(kind: LayerKind, build: BuildContext) -> DFlashLayer:
            return DFlashLayer(config, heads, build)

        rows, by_rows = padded(self.vocab_size, self.shards), P(TENSOR_AXIS, None)
        self.embed_tokens = Embedding(rows, size, build, partition=by_rows)
        self.fc = Linear(self.states, size, build, partition=P(None, None))
        self.hidden_norm = RMSNorm(size, eps, build)
        self.layers = LayerStack(kinds, make, build)
        self.norm = RMSNorm(size, eps, build)
        self.lm_head = Embedding(rows, size, build, partition=by_rows)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """See `jpaged.model_api.DraftHead`; the config counts the layers that the states leave."""
        return tuple(layer + 1 for layer in self.after)

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

        Where there is a `target` its keys and values are kept, and nothing else is computed: the hidden states mean
        nothing.
        """
        shared = Shared({"full": self.rotary.tables(positions)}, live_rows)
        if target is not None:
            context = self.hidden_norm(self.fc(target, live_rows))
            return self.layers(context, _Filling(shared.tables, live_rows), cache, attend)
        embedded = scaled(self.embed_tokens(tokens), self.embed_factor)
        hidden, cache = self.layers(embedded, shared, cache, partial(attend, sees_ahead=True))
        return self.norm(hidden), cache

    def logits(self, hidden: Float[Array, "seqs embed"], live_rows: LiveRows = None) -> Float[Array, "seqs vocab"]:
        """Return logits of the tokens in the places of the hidden states."""
        logits = self.lm_head.logits(hidden, live_rows)
        if self.head_bias is not None:
            logits = logits + self.head_bias[...].astype(logits.dtype)
        return within_vocabulary(logits, self.vocab_size)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters; those of the tables where the folder may have them."""
        rows = convert.vocab_rows(self.vocab_size, self.embed_tokens.weight.shape[0])
        yield from self.embed_tokens.weights(("embed_tokens",), "embed_tokens", rows)
        yield from self.fc.weights(("fc",), ("fc",), None, convert.linear(self.states, self.size))
        yield from self.hidden_norm.weights(("hidden_norm",), "hidden_norm")
        for number in range(len(self.layers.kinds)):
            yield from self.layers.layer(number).weights(f"layers.{number}", number)
        yield from self.norm.weights(("norm",), "norm")
        yield from self.lm_head.weights(("lm_head",), "lm_head", rows)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """See `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")


def _checked(config: Any) -> dict[str, Any]:
    """Return the fields of ``dflash_config``.

    Raises:
        ValueError: one is missing, out of range, or asks for another layout.
    """
    names = [name for name in config.architectures if "DFlash" in name]
    if names != ["DFlashDraftModel"] or config.model_type != "qwen3":
        raise ValueError(
            f"architectures={config.architectures} of model_type={config.model_type!r} are not supported; of DFlash "
            "drafters only DFlashDraftModel of qwen3"
        )
    own = dict(getattr(config, "dflash_config", None) or {})
    for name, only in _OTHER_LAYOUTS.items():
        if own.get(name) not in (None, only):
            raise ValueError(f"dflash_config: {name}={own[name]!r} is not supported; only {only!r}")
    for name, only in _OTHER_FIELDS.items():
        if getattr(config, name, None) not in (None, only):
            raise ValueError(f"{name}={getattr(config, name)!r} is not supported of a DFlash drafter; only {only!r}")
    if getattr(config, "draft_vocab_size", None) not in (None, config.vocab_size):
        raise ValueError(f"draft_vocab_size={config.draft_vocab_size} is not supported; only {config.vocab_size}")
    mask, layers, size = own.get("mask_token_id"), own.get("target_layer_ids"), getattr(config, "block_size", None)
    if not isinstance(mask, int) or not 0 <= mask < config.vocab_size:
        raise ValueError(f"dflash_config: mask_token_id={mask!r} must be a token, from 0 to {config.vocab_size - 1}")
    if not isinstance(layers, list) or not layers or not all(isinstance(at, int) and at >= 0 for at in layers):
        raise ValueError(f"dflash_config: target_layer_ids={layers!r} must be a list of layers")
    if not isinstance(size, int) or size < 2:
        raise ValueError(f"block_size={size!r} must be at least 2: the newest token and a draft")
    return own

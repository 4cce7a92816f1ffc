"""Gemma 2 and 3 (Gemma Team, 2024 and 2025): local and global layers in turn, so two groups of KV memory.

Embeddings are scaled by sqrt(embed), norms stand before and after each block, and the query scale is a field of its
own. Gemma 2 caps attention scores and logits by a tanh; Gemma 3 instead norms queries and keys, has five
local layers to a global one, and rotates the two by different frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields, Rope, every_nth
from .decoder import Decoder, check_model_type
from .groups import kinds_from_types, layer_groups, type_of_group
from .layers import GatedMLP, RMSNorm, check_activation
from .rope import rotary_from_config
from .stack import LayerKind, PendingResidual, Shared


class GemmaLayer(nnx.Module):
    """``x += norm(attention(norm(x))); x += norm(mlp(norm(x)))``."""

    takes_pending_residual = True

    def __init__(self, config: Any, heads: Heads, build: BuildContext):
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, build, offset=1.0)
        qk_norm = partial(RMSNorm, heads.head_dim, config.rms_norm_eps, build, offset=1.0)
        self.input_norm = norm()
        self.attention = Attention(
            config.hidden_size,
            heads,
            build,
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            qk_norm=qk_norm if config.model_type == "gemma3_text" else None,
        )
        self.post_attention_norm = norm()
        self.pre_mlp_norm = norm()
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            check_activation(config.hidden_activation, "hidden_activation"),
            build,
            bias=False,
        )
        self.post_mlp_norm = norm()

    def __call__(
        self,
        hidden: PendingResidual | Float[Array, "tokens embed"],
        shared: Shared,
        cache: Any,
        ref: LayerRef,
        attend: Attend,
    ) -> tuple[PendingResidual, Any]:
        hidden, normed = self.input_norm.norm_residual(hidden)
        mixed, cache = self.attention(normed, shared, cache, ref, attend)
        hidden, normed = self.pre_mlp_norm.norm_residual(
            PendingResidual(hidden, self.post_attention_norm.of_whole(mixed))
        )
        return PendingResidual(hidden, self.post_mlp_norm.of_whole(self.mlp(normed, shared.live_rows))), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        norms = {
            "input_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "pre_mlp_norm": "pre_feedforward_layernorm",
            "post_mlp_norm": "post_feedforward_layernorm",
        }
        for attribute, tensor in norms.items():
            yield from getattr(self, attribute).weights((attribute,), f"{name}.{tensor}", layer)
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        yield from self.mlp.weights(("mlp",), f"{name}.mlp", layer)


def _of_gemma3(fields: Fields) -> None:
    """Every sixth layer is global. An encoder's window lies around a token, half of it on each side."""
    if fields["use_bidirectional_attention"] and fields["sliding_window"] is not None:
        fields["sliding_window"] = fields["sliding_window"] // 2 + 1  # as transformers has it, which excludes the bound
    every_nth(fields, "sliding_attention", fields.get("sliding_window_pattern") or 6)


_CONFIGS = {
    "gemma2": ConfigReader(
        {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-06,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "layer_types": None,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "use_bidirectional_attention": None,
        },
        follow=partial(every_nth, local="sliding_attention", period=2),
    ),
    "gemma3_text": ConfigReader(
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-06,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "layer_types": None,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        rope=Rope(1000000.0, by_type=True, local_name="rope_local_base_freq"),
        follow=_of_gemma3,
    ),
}
"""Reads the configs, by ``model_type``."""


class Gemma(Decoder):
    """`jpaged.model_api.CausalLM`; `config` is a Hugging Face ``Gemma2Config`` or ``Gemma3TextConfig``."""

    configs = _CONFIGS

    @staticmethod
    def encodes(config: Any) -> bool:
        """Tell whether the config is that of an encoder, such as EmbeddingGemma (Vera et al., 2025)."""
        return bool(getattr(config, "use_bidirectional_attention", False)) or Decoder.encodes(config)

    @staticmethod
    def reach(config: Any) -> int | None:
        """See `Decoder.reach`; the config's window counts the token itself."""
        window = config.sliding_window
        return window - 1 if config.use_bidirectional_attention and window is not None else window

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("gemma2", "gemma3_text"))
        third = config.model_type == "gemma3_text"
        if config.use_bidirectional_attention and not third:
            raise ValueError("use_bidirectional_attention=True is not supported: attention is causal")
        if third and config.attn_logit_softcapping is not None:
            raise ValueError(f"attn_logit_softcapping={config.attn_logit_softcapping} is not supported for Gemma 3")
        heads = Heads.of_config(config, build)
        kinds = kinds_from_types(config)
        groups = layer_groups(
            kinds, heads.layout.kv_heads, config.head_dim, config.sliding_window, q_per_kv=heads.layout.q_per_kv
        )

        def make(kind: LayerKind, build: BuildContext) -> GemmaLayer:
            return GemmaLayer(config, heads, build)

        types = {group.name: type_of_group(group.name) if third else None for group in groups}
        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=groups,
            rotary={name: rotary_from_config(config, config.head_dim, kind) for name, kind in types.items()},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, build, offset=1.0),
            embed_factor=config.hidden_size**0.5,
            logit_soft_cap=config.final_logit_softcapping,
        )

"""OLMo 3 (Allen Institute for AI, 2025): norms stand after each block, three local layers to a global one.

Queries and keys are normed over all heads together, before rotation; local and global layers rotate by frequencies of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from .attention import Attention, Heads
from .decoder import Decoder, check_model_type
from .groups import kinds_from_types, layer_groups, type_of_group
from .layers import GatedMLP, RMSNorm, check_activation
from .rope import rotary_from_config
from .stack import LayerKind, Shared


class Olmo3Layer(nnx.Module):
    """``x += norm(attention(x)); x += norm(mlp(x))``."""

    def __init__(self, config: Any, heads: Heads, build: BuildContext):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention = Attention(
            size,
            heads,
            build,
            scale=heads.head_dim**-0.5,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            norm_of_heads=eps,
        )
        self.post_attention_norm = RMSNorm(size, eps, build)
        activation = check_activation(config.hidden_act, "hidden_act")
        self.mlp = GatedMLP(size, config.intermediate_size, activation, build, bias=False)
        self.post_mlp_norm = RMSNorm(size, eps, build)

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        mixed, cache = self.attention(hidden, shared, cache, ref, attend)
        hidden = hidden + self.post_attention_norm.of_whole(mixed)
        return hidden + self.post_mlp_norm.of_whole(self.mlp(hidden, shared.live_rows)), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        norm = f"{name}.post_attention_layernorm"
        yield from self.post_attention_norm.weights(("post_attention_norm",), norm, layer)
        yield from self.mlp.weights(("mlp",), f"{name}.mlp", layer)
        yield from self.post_mlp_norm.weights(("post_mlp_norm",), f"{name}.post_feedforward_layernorm", layer)


class Olmo3(Decoder):
    """`jpaged.model_api.CausalLM` for OLMo 3; `config` is a Hugging Face ``Olmo3Config``."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("olmo3",))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = Heads.of(config.num_attention_heads, config.num_key_value_heads, head_dim, build)
        kinds = kinds_from_types(config)
        groups = layer_groups(
            kinds, heads.layout.kv_heads, head_dim, config.sliding_window, q_per_kv=heads.layout.q_per_kv
        )

        def make(kind: LayerKind, build: BuildContext) -> Olmo3Layer:
            return Olmo3Layer(config, heads, build)

        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=groups,
            rotary={group.name: rotary_from_config(config, head_dim, type_of_group(group.name)) for group in groups},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, build),
        )

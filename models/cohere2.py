"""Cohere 2 (Command R7B and Command A): attention and MLP side by side, three local layers to a global one.

Both read one LayerNorm without bias and are added to the residual stream together. Local layers rotate
neighbouring pairs of each head, global ones know no positions (Yang et al., 2025), and logits are scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from .attention import Attention, Heads
from .decoder import Decoder, check_model_type
from .groups import kinds_from_types, layer_groups
from .layers import GatedMLP, LayerNorm, check_activation
from .rope import rotary_from_config
from .stack import LayerKind, Shared

_FIXED = {"use_parallel_block": True, "use_gated_activation": True, "use_qk_norm": False, "rotary_pct": 1.0}
"""Fields that published configs carry and transformers does not read: the values it takes for granted."""


class Cohere2Layer(nnx.Module):
    """``y = norm(x); x += attention(y) + mlp(y)``."""

    def __init__(self, config: Any, heads: Heads, build: BuildContext):
        size = config.hidden_size
        self.input_norm = LayerNorm(size, config.layer_norm_eps, build, bias=False)
        self.attention = Attention(
            size,
            heads,
            build,
            scale=heads.head_dim**-0.5,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
        )
        self.mlp = GatedMLP(
            size,
            config.intermediate_size,
            check_activation(config.hidden_act, "hidden_act"),
            build,
            bias=False,
        )

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        inside = self.input_norm(hidden)
        mixed, cache = self.attention(inside, shared, cache, ref, attend)
        return hidden + mixed + self.mlp(inside, shared.live_rows), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.input_norm.weights(("input_norm",), f"{name}.input_layernorm", layer)
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        yield from self.mlp.weights(("mlp",), f"{name}.mlp", layer)


class Cohere2(Decoder):
    """`jpaged.model_api.CausalLM` for Cohere 2; `config` is a Hugging Face ``Cohere2Config``."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("cohere2",))
        for field, value in _FIXED.items():
            if getattr(config, field, value) != value:
                raise ValueError(f"{field}={getattr(config, field)} is not supported; only {value}")
        heads = Heads.of(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            build,
            rotates_neighbours=True,
        )
        kinds = kinds_from_types(config)
        rotary = rotary_from_config(config, config.head_dim)

        def make(kind: LayerKind, build: BuildContext) -> Cohere2Layer:
            return Cohere2Layer(config, heads, build)

        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=layer_groups(
                kinds, heads.layout.kv_heads, config.head_dim, config.sliding_window, q_per_kv=heads.layout.q_per_kv
            ),
            rotary={"window": rotary, "full": None},
            norm=LayerNorm(config.hidden_size, config.layer_norm_eps, build, bias=False),
            logit_scale=config.logit_scale,
        )

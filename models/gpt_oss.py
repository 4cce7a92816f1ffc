"""GPT-OSS (OpenAI, 2025): local and global layers in turn, attention with sinks, an MLP that is all experts.

A sink is a logit of each query head that takes its share of the softmax and gives nothing (Xiao et al., 2023, learnt).
Experts have biases and a clamped SwiGLU whose linear half is shifted by one; a token's experts are weighted by the
softmax of their own scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from . import weights as convert
from .attention import Attention, Heads
from .config_reader import ConfigReader, Rope, dense, every_nth
from .decoder import Decoder, check_model_type
from .experts import ExpertMLPs
from .groups import kinds_from_types, layer_groups
from .layers import RMSNorm
from .linear import Linear, LiveRows
from .mixture import ExpertLayout
from .rope import rotary_from_config
from .routing import Routing
from .stack import LayerKind, Shared


class ClampedExperts(ExpertMLPs):
    """``sum_e share_e * (down_e(clamped(gate, up)) + bias)`` over a token's experts, see `clamped`.

    Parameters: those of `ExpertMLPs`, with biases; router [embed, experts] with a bias.
    """

    def __init__(self, config: Any, layout: ExpertLayout, build: BuildContext):
        size, width = config.hidden_size, config.intermediate_size
        combine = partial(clamped, alpha=config.swiglu_alpha, limit=config.swiglu_limit)
        super().__init__(size, width, "silu", build, layout=layout, bias=True, combine=combine)
        self.router = Linear(size, layout.experts, build, partition=P(None, None), bias=True)
        self.routing = Routing(config.num_experts_per_tok, sums_to_one=True, added_to_sum=0.0)

    def routed(self, x: Float[Array, "tokens embed"], live_rows: LiveRows = None) -> Float[Array, "tokens embed"]:
        """Return the sum over the experts that the router picks."""
        logits = self.router(x, live_rows)
        if self.launches(x):
            return self.of_dense(x, self.routing.dense(logits.astype(jnp.float32), None, x.dtype, self.impl))
        scores, chosen = jax.lax.top_k(logits, self.routing.per_token)
        return self(x, jax.nn.softmax(scores, axis=-1), chosen)

    def routed_weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.router`` and ``{name}.experts``, whose gate and up columns
        alternate."""
        router = convert.linear(self.embed.stored, self.layout.experts)
        yield from self.router.weights((*path, "router"), (f"{name}.router",), layer, router, may_quantise=False)
        yield from self.weights(path, f"{name}.experts", layer, alternating=True)


def clamped(gate: Array, up: Array, *, alpha: float, limit: float) -> Array:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)`` of values that are cut at the limit."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


class GptOssLayer(nnx.Module):
    """``x += attention(norm(x)); x += experts(norm(x))``."""

    def __init__(self, config: Any, heads: Heads, layout: ExpertLayout, build: BuildContext):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, build)
        self.attention = Attention(
            size,
            heads,
            build,
            scale=heads.head_dim**-0.5,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            sinks=True,
        )
        self.post_norm = RMSNorm(size, eps, build)
        self.experts = ClampedExperts(config, layout, build)

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        mixed, cache = self.attention(self.input_norm(hidden), shared, cache, ref, attend)
        hidden = hidden + mixed
        return hidden + self.experts.routed(self.post_norm(hidden), shared.live_rows), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.input_norm.weights(("input_norm",), f"{name}.input_layernorm", layer)
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        yield from self.post_norm.weights(("post_norm",), f"{name}.post_attention_layernorm", layer)
        yield from self.experts.routed_weights(("experts",), f"{name}.mlp", layer)


_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


_CONFIGS = {
    "gpt_oss": ConfigReader(
        dense(
            num_hidden_layers=36,
            num_local_experts=128,
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            head_dim=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            sliding_window=128,
            max_position_embeddings=131072,
            rms_norm_eps=1e-05,
            num_experts_per_tok=4,
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
            layer_types=None,
            bos_token_id=None,
            eos_token_id=None,
            attention_bias=True,
        ),
        rope=Rope(150000.0, scaling=_ROPE),
        follow=partial(every_nth, local="sliding_attention", period=2),
        same=(("num_experts", "num_local_experts"),),
    ),
}
"""Reads the configs, by ``model_type``."""


class GptOss(Decoder):
    """`jpaged.model_api.CausalLM` for GPT-OSS; `config` is a Hugging Face ``GptOssConfig``."""

    configs = _CONFIGS

    _has_experts = True

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("gpt_oss",))
        heads = Heads.of_config(config, build)
        kinds = kinds_from_types(config)
        groups = layer_groups(
            kinds, heads.layout.kv_heads, config.head_dim, config.sliding_window, q_per_kv=heads.layout.q_per_kv
        )
        rotary = rotary_from_config(config, config.head_dim)
        layout = ExpertLayout(config.num_local_experts, build.tensor_parallel, build.expert_parallel)

        def make(kind: LayerKind, build: BuildContext) -> GptOssLayer:
            return GptOssLayer(config, heads, layout, build)

        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=groups,
            rotary={group.name: rotary for group in groups},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, build),
        )

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

from jpaged.model_api import TENSOR_AXIS, Attend, BuildContext, LayerRef, WeightSource

from . import weights as convert
from .attention import Attention, Heads
from .config_reader import ConfigReader, Rope, dense, every_nth
from .decoder import Decoder, check_model_type
from .groups import kinds_from_types, layer_groups
from .layers import RMSNorm
from .linear import ExpertLinear, ExpertTable, Linear, LiveRows
from .mixture import ExpertLayout, by_expert
from .rope import rotary_from_config
from .stack import LayerKind, Shared


class ClampedExperts(nnx.Module):
    """``sum_e share_e * (down_e((min(up, limit) + 1) * gate * sigmoid(alpha * gate)) + bias)`` over a token's experts.

    router [embed, experts], gate_up [experts, embed, 2 * mlp] and down [experts, mlp, embed], the columns of each
    expert as in `GatedMLP`; all have biases.
    """

    def __init__(self, config: Any, layout: ExpertLayout, build: BuildContext):
        size, experts = config.hidden_size, layout.experts
        self.width = convert.Padded(config.intermediate_size, layout.column_shards)
        mlp = self.width.size
        columns, rows = layout.partition(None, None, TENSOR_AXIS), layout.partition(None, TENSOR_AXIS, None)
        self.router = Linear(size, experts, build, partition=P(None, None), bias=True)
        self.gate_up = ExpertLinear(experts, size, 2 * mlp, build, partition=columns, bias=True)
        self.down = ExpertLinear(experts, mlp, size, build, partition=rows, bias=True)
        self.per_token, self.layout = config.num_experts_per_tok, layout
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def __call__(self, x: Float[Array, "tokens embed"], live_rows: LiveRows = None) -> Float[Array, "tokens embed"]:
        scores, chosen = jax.lax.top_k(self.router(x, live_rows), self.per_token)
        tables = self.gate_up.table, self.down.table
        return self.layout.mix(self._mlps, x, jax.nn.softmax(scores, axis=-1), chosen, tables)

    def _mlps(self, x: Array, share: Array, chosen: Array, tables: tuple[ExpertTable, ExpertTable]) -> Array:
        gate_up, down = tables
        rows = by_expert(chosen, down.experts)
        both = gate_up.multiply(x[rows.token], rows)
        gate, up = jnp.split(both.reshape(len(both), self.layout.column_shards, -1), 2, axis=-1)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        inner = ((up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)).reshape(len(both), -1)
        out = down.multiply(inner, rows)
        return rows.combine(out * share.reshape(-1)[rows.pair, None], into=x)

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.router`` and ``{name}.experts``, whose gate and up columns
        alternate."""
        fuse, pad = convert.split_alternating(self.width), convert.pad_axis(1, self.width)
        router = convert.linear(self.down.weight.shape[-1], self.layout.experts)
        yield from self.router.weights((*path, "router"), (f"{name}.router",), layer, router, may_quantise=False)
        yield from self.gate_up.weights((*path, "gate_up"), (f"{name}.experts.gate_up_proj",), layer, fuse, fuse)
        yield from self.down.weights((*path, "down"), (f"{name}.experts.down_proj",), layer, pad)


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
        return hidden + self.experts(self.post_norm(hidden), shared.live_rows), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.input_norm.weights(("input_norm",), f"{name}.input_layernorm", layer)
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        yield from self.post_norm.weights(("post_norm",), f"{name}.post_attention_layernorm", layer)
        yield from self.experts.weights(("experts",), f"{name}.mlp", layer)


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

"""GPT-OSS (OpenAI, 2025): local and global layers in turn, attention with sinks, an MLP that is all experts.

A sink is a logit of each query head that takes its share of the softmax and gives nothing (Xiao et al., 2023, learnt).
Experts have biases and a clamped SwiGLU whose linear half is shifted by one; a token's experts are weighted by the
softmax of their own scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, Attend, LayerRef, WeightSource, padded

from . import weights as convert
from .attention import Attention, Heads
from .decoder import Decoder, check_model_type
from .groups import kinds_from_types, layer_groups
from .layers import RMSNorm, dot, random_param, zeros_param
from .mixture import ExpertLayout, by_expert, grouped_dot, rows_of_expert
from .rope import rotary_from_config
from .stack import LayerKind


class ClampedExperts(nnx.Module):
    """``sum_e share_e * (down_e((min(up, limit) + 1) * gate * sigmoid(alpha * gate)) + bias)`` over a token's experts.

    router [embed, experts], gate_up [experts, embed, 2 * mlp] and down [experts, mlp, embed], the columns of each
    expert as in `GatedMLP`; their biases.
    """

    def __init__(self, config: Any, *, layout: ExpertLayout, dtype: jnp.dtype, rngs: nnx.Rngs):
        size, experts = config.hidden_size, layout.experts
        mlp = padded(config.intermediate_size, layout.column_shards)
        self.router = random_param(rngs, (size, experts), dtype)
        self.router_bias = zeros_param((experts,), dtype)
        self.gate_up = random_param(rngs, (experts, size, 2 * mlp), dtype)
        self.gate_up_bias = zeros_param((experts, 2 * mlp), dtype)
        self.down = random_param(rngs, (experts, mlp, size), dtype)
        self.down_bias = zeros_param((experts, size), dtype)
        self.per_token, self.layout = config.num_experts_per_tok, layout
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        scores, chosen = jax.lax.top_k(dot(x, self.router[...]) + self.router_bias[...], self.per_token)
        tables = self.gate_up[...], self.gate_up_bias[...], self.down[...], self.down_bias[...]
        return self.layout.mix(self._mlps, x, jax.nn.softmax(scores, axis=-1), chosen, tables)

    def _mlps(self, x: Array, share: Array, chosen: Array, tables: tuple[Any, ...]) -> Array:
        gate_up, gate_up_bias, down, down_bias = tables
        rows = by_expert(chosen, down.shape[0])
        both = grouped_dot(x[rows.token], gate_up, rows.counts) + rows_of_expert(gate_up_bias, rows.expert)
        gate, up = jnp.split(both.reshape(len(both), self.layout.column_shards, -1), 2, axis=-1)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        inner = ((up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)).reshape(len(both), -1)
        out = grouped_dot(inner, down, rows.counts) + rows_of_expert(down_bias, rows.expert)
        return rows.combine(out * share.reshape(-1)[rows.pair, None], into=x)

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Tensors ``{name}.router`` and ``{name}.experts``, whose gate and up columns alternate."""
        (mlp, embed), layout = self.down.shape[-2:], self.layout
        fuse = convert.split_alternating(mlp, layout.column_shards)
        sources = [
            ("router", "router.weight", convert.linear(embed, layout.experts), P(None, None)),
            ("router_bias", "router.bias", convert.as_stored, P(None)),
            ("gate_up", "experts.gate_up_proj", fuse, layout.partition(None, None, TENSOR_AXIS)),
            ("gate_up_bias", "experts.gate_up_proj_bias", fuse, layout.partition(None, TENSOR_AXIS)),
            ("down", "experts.down_proj", convert.pad_axis(1, mlp), layout.partition(None, TENSOR_AXIS, None)),
            ("down_bias", "experts.down_proj_bias", convert.as_stored, layout.partition(None, None)),
        ]
        for param, tensor, how, partition in sources:
            contracted = -2 if param in ("gate_up", "down") else None
            yield WeightSource((*path, param), (f"{name}.{tensor}",), how, partition, layer, contracted)


class GptOssLayer(nnx.Module):
    """``x += attention(norm(x)); x += experts(norm(x))``."""

    def __init__(self, config: Any, heads: Heads, *, layout: ExpertLayout, dtype: jnp.dtype, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, dtype=dtype)
        self.attention = Attention(
            size,
            heads,
            scale=heads.head_dim**-0.5,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            sinks=True,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_norm = RMSNorm(size, eps, dtype=dtype)
        self.experts = ClampedExperts(config, layout=layout, dtype=dtype, rngs=rngs)

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Any, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        mixed, cache = self.attention(self.input_norm(hidden), shared[ref.group], cache, ref, attend)
        hidden = hidden + mixed
        return hidden + self.experts(self.post_norm(hidden)), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.input_norm.weights(("input_norm",), f"{name}.input_layernorm", layer)
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        yield from self.post_norm.weights(("post_norm",), f"{name}.post_attention_layernorm", layer)
        yield from self.experts.weights(("experts",), f"{name}.mlp", layer)


class GptOss(Decoder):
    """`jpaged.model_api.CausalLM` for GPT-OSS; `config` is a Hugging Face ``GptOssConfig``."""

    def __init__(
        self,
        config: Any,
        *,
        dtype: jnp.dtype,
        tensor_parallel: int = 1,
        expert_parallel: bool = False,
        stacked: bool = False,
        rngs: nnx.Rngs,
    ):
        """Random weights; wrap in ``nnx.eval_shape`` for shapes only.

        Raises:
            ValueError: naming the config's field that asks for what is not implemented; or see `ExpertLayout`.
        """
        check_model_type(config, ("gpt_oss",))
        heads = Heads.of(config.num_attention_heads, config.num_key_value_heads, config.head_dim, tensor_parallel)
        kinds = kinds_from_types(config)
        groups = layer_groups(kinds, heads.layout.kv_heads, config.head_dim, config.sliding_window)
        rotary = rotary_from_config(config, config.head_dim)
        layout = ExpertLayout(config.num_local_experts, tensor_parallel, expert_parallel)

        def make(kind: LayerKind, rngs: nnx.Rngs) -> GptOssLayer:
            return GptOssLayer(config, heads, layout=layout, dtype=dtype, rngs=rngs)

        super().__init__(
            config,
            kinds,
            make,
            groups=groups,
            rotary={group.name: rotary for group in groups},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype),
            dtype=dtype,
            tensor_parallel=tensor_parallel,
            stacked=stacked,
            rngs=rngs,
        )

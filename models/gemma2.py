"""Gemma 2 (Gemma Team, 2024): local and global layers in turn, so two groups of KV memory.

Embeddings are scaled by sqrt(embed), norms stand before and after each block, attention scores and logits are
capped by a tanh, and the query scale is a field of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import TENSOR_AXIS, Attend, LayerRef, WeightSource, padded

from . import weights as convert
from .attention import Attention, Heads
from .groups import kinds_from_types, layer_groups
from .layers import GatedMLP, RMSNorm, check_activation, embed, random_param, vocab_logits
from .rope import rotary_from_config
from .stack import LayerKind, LayerStack


class Gemma2Layer(nnx.Module):
    """``x += norm(attention(norm(x))); x += norm(mlp(norm(x)))``."""

    def __init__(self, config: Any, heads: Heads, *, tensor_parallel: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, offset=1.0)

        self.input_norm = norm()
        self.attention = Attention(
            config.hidden_size,
            heads,
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_attention_norm = norm()
        self.pre_mlp_norm = norm()
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            check_activation(config.hidden_activation, "hidden_activation"),
            bias=False,
            tensor_parallel=tensor_parallel,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_mlp_norm = norm()

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Any, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        mixed, cache = self.attention(self.input_norm(hidden), shared, cache, ref, attend)
        hidden = hidden + self.post_attention_norm(mixed)
        return hidden + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(hidden))), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Sources of layer number `layer`, whose tensors begin with `name`."""
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


class Gemma2(nnx.Module):
    """`jpaged.model_api.CausalLM` for Gemma 2; `config` is a Hugging Face ``Gemma2Config``."""

    def __init__(
        self,
        config: Any,
        *,
        dtype: jnp.dtype,
        tensor_parallel: int = 1,
        stacked: bool = False,
        rngs: nnx.Rngs,
    ):
        """Random weights; wrap in ``nnx.eval_shape`` for shapes only.

        Raises:
            ValueError: naming the config's field that asks for what is not implemented.
        """
        if config.model_type != "gemma2":
            raise ValueError(f"model_type={config.model_type!r} is not 'gemma2'")
        if config.use_bidirectional_attention:
            raise ValueError("use_bidirectional_attention=True is not supported: attention is causal")
        heads = Heads.of(config.num_attention_heads, config.num_key_value_heads, config.head_dim, tensor_parallel)
        kinds = kinds_from_types(config)
        self.layer_groups = layer_groups(kinds, heads.layout.kv_heads, config.head_dim, config.sliding_window)
        self.vocab_size = config.vocab_size
        self.final_soft_cap = config.final_logit_softcapping
        self.rotary = rotary_from_config(config, config.head_dim)

        def make(kind: LayerKind, rngs: nnx.Rngs) -> Gemma2Layer:
            return Gemma2Layer(config, heads, tensor_parallel=tensor_parallel, dtype=dtype, rngs=rngs)

        table = padded(config.vocab_size, tensor_parallel), config.hidden_size
        self.embed_tokens = random_param(rngs, table, dtype)
        self.layers = LayerStack(kinds, make, stacked=stacked, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, offset=1.0)
        self.lm_head = None if config.tie_word_embeddings else random_param(rngs, table, dtype)

    def __call__(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], cache: Any, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        hidden = embed(self.embed_tokens[...], tokens)
        # The model was trained with this factor rounded to the parameters' dtype.
        hidden = hidden * jnp.asarray(hidden.shape[-1] ** 0.5, hidden.dtype)
        hidden, cache = self.layers(hidden, self.rotary.tables(positions), cache, attend)
        return self.norm(hidden), cache

    def logits(self, hidden: Float[Array, "seqs embed"]) -> Float[Array, "seqs vocab"]:
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        return vocab_logits(hidden, table[...], self.vocab_size, self.final_soft_cap)

    def weights(self) -> Iterator[WeightSource]:
        rows = convert.pad_rows(self.embed_tokens.shape[0])
        by_rows = P(TENSOR_AXIS, None)
        yield WeightSource(("embed_tokens",), ("model.embed_tokens.weight",), rows, by_rows)
        for number in range(len(self.layers.kinds)):
            yield from self.layers.layer(number).weights(f"model.layers.{number}", number)
        yield from self.norm.weights(("norm",), "model.norm")
        if self.lm_head is not None:
            yield WeightSource(("lm_head",), ("lm_head.weight",), rows, by_rows)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        return self.layers.locate(source, "layers")

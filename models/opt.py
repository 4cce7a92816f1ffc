"""OPT (Zhang et al., 2022), and Galactica, which has its shape without biases.

Learned absolute positions, LayerNorm, a two-layer MLP, biases everywhere. The 350M model alone norms after
each block, has no final norm and keeps its vocabulary at a smaller width than its layers.
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
from .groups import layer_groups
from .layers import (
    ACTIVATIONS,
    LayerNorm,
    check_activation,
    dot,
    embed,
    random_param,
    vocab_logits,
    zeros_param,
)
from .stack import LayerKind, LayerStack

_POSITION_OFFSET = 2
"""Rows of the position table before position 0, left over from fairseq's padding index."""

_EPS = 1e-5
"""Of every LayerNorm; not in the config."""


class FeedForward(nnx.Module):
    """``down(act(up(x)))``; up [embed, mlp], down [mlp, embed], columns beyond the checkpoint's are zero."""

    def __init__(self, config: Any, *, tensor_parallel: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        embed, mlp, bias = config.hidden_size, padded(config.ffn_dim, tensor_parallel), config.enable_bias
        self.up = random_param(rngs, (embed, mlp), dtype)
        self.up_bias = zeros_param((mlp,), dtype) if bias else None
        self.down = random_param(rngs, (mlp, embed), dtype)
        self.down_bias = zeros_param((embed,), dtype) if bias else None
        self.activation = check_activation(config.activation_function, "activation_function")

    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        wide = dot(x, self.up[...])
        if self.up_bias is not None:
            wide = wide + self.up_bias[...]
        out = dot(ACTIVATIONS[self.activation](wide), self.down[...])
        return out if self.down_bias is None else out + self.down_bias[...]

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Tensors ``{name}.fc1`` and ``{name}.fc2``."""
        mlp, embed = self.down.shape[-2:]
        sources = [
            ("up", "fc1.weight", convert.linear(embed, mlp), P(None, TENSOR_AXIS)),
            ("up_bias", "fc1.bias", convert.pad_rows(mlp), P(TENSOR_AXIS)),
            ("down", "fc2.weight", convert.linear(mlp, embed), P(TENSOR_AXIS, None)),
            ("down_bias", "fc2.bias", convert.as_stored, P(None)),
        ]
        for param, tensor, how, partition in sources:
            if getattr(self, param) is not None:
                yield WeightSource((*path, param), (f"{name}.{tensor}",), how, partition, layer)


class OPTLayer(nnx.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``, or ``x = norm(x + attention(x))`` and so on."""

    def __init__(self, config: Any, heads: Heads, *, tensor_parallel: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        size, affine = config.hidden_size, config.layer_norm_elementwise_affine
        self.attention_norm = LayerNorm(size, _EPS, dtype=dtype, affine=affine)
        self.attention = Attention(
            size,
            heads,
            scale=heads.head_dim**-0.5,
            qkv_bias=config.enable_bias,
            out_bias=config.enable_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = LayerNorm(size, _EPS, dtype=dtype, affine=affine)
        self.mlp = FeedForward(config, tensor_parallel=tensor_parallel, dtype=dtype, rngs=rngs)
        self.norm_before = config.do_layer_norm_before

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: None, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        inside = self.attention_norm(hidden) if self.norm_before else hidden
        mixed, cache = self.attention(inside, None, cache, ref, attend)
        hidden = hidden + mixed
        if self.norm_before:
            return hidden + self.mlp(self.mlp_norm(hidden)), cache
        hidden = self.attention_norm(hidden)
        return self.mlp_norm(hidden + self.mlp(hidden)), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer, out_name="out_proj")
        yield from self.attention_norm.weights(("attention_norm",), f"{name}.self_attn_layer_norm", layer)
        yield from self.mlp.weights(("mlp",), name, layer)
        yield from self.mlp_norm.weights(("mlp_norm",), f"{name}.final_layer_norm", layer)


class OPT(nnx.Module):
    """`jpaged.model_api.CausalLM` for OPT; `config` is a Hugging Face ``OPTConfig``."""

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
        if config.model_type != "opt":
            raise ValueError(f"model_type={config.model_type!r} is not 'opt'")
        size, word_size = config.hidden_size, config.word_embed_proj_dim
        if size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size={size} is not a multiple of num_attention_heads={config.num_attention_heads}"
            )
        count = config.num_attention_heads
        heads = Heads.of(count, count, size // count, tensor_parallel)
        kinds = (LayerKind("full"),) * config.num_hidden_layers
        self.layer_groups = layer_groups(kinds, heads.layout.kv_heads, heads.head_dim, None)
        self.vocab_size = config.vocab_size

        def make(kind: LayerKind, rngs: nnx.Rngs) -> OPTLayer:
            return OPTLayer(config, heads, tensor_parallel=tensor_parallel, dtype=dtype, rngs=rngs)

        table = padded(config.vocab_size, tensor_parallel), word_size
        projected = word_size != size
        self.embed_tokens = random_param(rngs, table, dtype)
        positions = config.max_position_embeddings + _POSITION_OFFSET
        self.embed_positions = random_param(rngs, (positions, size), dtype)
        self.project_in = random_param(rngs, (word_size, size), dtype) if projected else None
        self.layers = LayerStack(kinds, make, stacked=stacked, rngs=rngs)
        has_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
        affine = config.layer_norm_elementwise_affine
        self.norm = LayerNorm(size, _EPS, dtype=dtype, affine=affine) if has_norm else None
        self.project_out = random_param(rngs, (size, word_size), dtype) if projected else None
        self.lm_head = None if config.tie_word_embeddings else random_param(rngs, table, dtype)

    def __call__(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], cache: Any, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        hidden = embed(self.embed_tokens[...], tokens)
        if self.project_in is not None:
            hidden = dot(hidden, self.project_in[...])
        hidden = hidden + embed(self.embed_positions[...], positions + _POSITION_OFFSET)
        hidden, cache = self.layers(hidden, None, cache, attend)
        return (hidden if self.norm is None else self.norm(hidden)), cache

    def logits(self, hidden: Float[Array, "seqs embed"]) -> Float[Array, "seqs vocab"]:
        """The projection to the vocabulary's width happens here, for the few rows that are sampled."""
        if self.project_out is not None:
            hidden = dot(hidden, self.project_out[...])
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        return vocab_logits(hidden, table[...], self.vocab_size)

    def weights(self) -> Iterator[WeightSource]:
        rows = convert.pad_rows(self.embed_tokens.shape[0])
        by_rows, whole = P(TENSOR_AXIS, None), P(None, None)
        word_size, size = self.embed_tokens.shape[1], self.embed_positions.shape[1]
        sources = [
            ("embed_tokens", "model.decoder.embed_tokens.weight", rows, by_rows),
            ("embed_positions", "model.decoder.embed_positions.weight", convert.as_stored, whole),
            ("project_in", "model.decoder.project_in.weight", convert.linear(word_size, size), whole),
            ("project_out", "model.decoder.project_out.weight", convert.linear(size, word_size), whole),
            ("lm_head", "lm_head.weight", rows, by_rows),
        ]
        for param, tensor, how, partition in sources:
            if getattr(self, param) is not None:
                yield WeightSource((param,), (tensor,), how, partition)
        if self.norm is not None:
            yield from self.norm.weights(("norm",), "model.decoder.final_layer_norm")
        for number in range(len(self.layers.kinds)):
            yield from self.layers.layer(number).weights(f"model.decoder.layers.{number}", number)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        return self.layers.locate(source, "layers")

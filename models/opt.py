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
from .decoder import Decoder, check_model_type
from .groups import layer_groups
from .layers import ACTIVATIONS, LayerNorm, check_activation, dot, embed, random_param, zeros_param
from .stack import LayerKind

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
                contracted = -2 if tensor.endswith("weight") else None
                yield WeightSource((*path, param), (f"{name}.{tensor}",), how, partition, layer, contracted)


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
        self, hidden: Float[Array, "tokens embed"], shared: Any, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        inside = self.attention_norm(hidden) if self.norm_before else hidden
        mixed, cache = self.attention(inside, shared[ref.group], cache, ref, attend)
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


class OPT(Decoder):
    """`jpaged.model_api.CausalLM` for OPT; `config` is a Hugging Face ``OPTConfig``."""

    _prefix = "model.decoder"
    _norm_name = "final_layer_norm"

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
        check_model_type(config, ("opt",))
        size, word_size = config.hidden_size, config.word_embed_proj_dim
        if size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size={size} is not a multiple of num_attention_heads={config.num_attention_heads}"
            )
        count = config.num_attention_heads
        heads = Heads.of(count, count, size // count, tensor_parallel)
        kinds = (LayerKind("full"),) * config.num_hidden_layers
        groups = layer_groups(kinds, heads.layout.kv_heads, heads.head_dim, None)

        def make(kind: LayerKind, rngs: nnx.Rngs) -> OPTLayer:
            return OPTLayer(config, heads, tensor_parallel=tensor_parallel, dtype=dtype, rngs=rngs)

        has_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
        affine = config.layer_norm_elementwise_affine
        super().__init__(
            config,
            kinds,
            make,
            groups=groups,
            rotary={"full": None},
            norm=LayerNorm(size, _EPS, dtype=dtype, affine=affine) if has_norm else None,
            width=word_size,
            dtype=dtype,
            tensor_parallel=tensor_parallel,
            stacked=stacked,
            rngs=rngs,
        )
        projected = word_size != size
        positions = config.max_position_embeddings + _POSITION_OFFSET
        self.embed_positions = random_param(rngs, (positions, size), dtype)
        self.project_in = random_param(rngs, (word_size, size), dtype) if projected else None
        self.project_out = random_param(rngs, (size, word_size), dtype) if projected else None

    def embed(self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"]) -> Float[Array, "tokens embed"]:
        hidden = super().embed(tokens, positions)
        if self.project_in is not None:
            hidden = dot(hidden, self.project_in[...])
        return hidden + embed(self.embed_positions[...], positions + _POSITION_OFFSET, self.dtype)

    def logits(self, hidden: Float[Array, "seqs embed"]) -> Float[Array, "seqs vocab"]:
        """The projection to the vocabulary's width happens here, for the few rows that are sampled."""
        return super().logits(hidden if self.project_out is None else dot(hidden, self.project_out[...]))

    def weights(self) -> Iterator[WeightSource]:
        whole = P(None, None)
        word_size, size = self.embed_tokens.shape[1], self.embed_positions.shape[1]
        sources = [
            ("embed_positions", convert.as_stored, None),
            ("project_in", convert.linear(word_size, size), -2),
            ("project_out", convert.linear(size, word_size), -2),
        ]
        for param, how, contracted in sources:
            if getattr(self, param) is not None:
                name = f"{self._prefix}.{param}.weight"
                yield WeightSource((param,), (name,), how, whole, contracted=contracted)
        yield from super().weights()

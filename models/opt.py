"""OPT (Zhang et al., 2022), and Galactica, which has its shape without biases.

Learned absolute positions, LayerNorm, a two-layer MLP, biases everywhere. The 350M model alone norms after
each block, has no final norm and keeps its vocabulary at a smaller width than its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from . import weights as convert
from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields
from .decoder import Decoder, check_model_type
from .groups import layer_groups
from .layers import FeedForward, LayerNorm, check_activation
from .linear import Embedding, Linear, LiveRows
from .stack import LayerKind, Shared

_POSITION_OFFSET = 2
"""Rows of the position table before position 0, left over from fairseq's padding index."""

_EPS = 1e-5
"""The epsilon of every LayerNorm, which the config does not have."""


class OPTLayer(nnx.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``, or ``x = norm(x + attention(x))`` and so on."""

    def __init__(self, config: Any, heads: Heads, build: BuildContext):
        size, affine = config.hidden_size, config.layer_norm_elementwise_affine
        self.attention_norm = LayerNorm(size, _EPS, build, affine=affine)
        self.attention = Attention(
            size,
            heads,
            build,
            scale=heads.head_dim**-0.5,
            qkv_bias=config.enable_bias,
            out_bias=config.enable_bias,
        )
        self.mlp_norm = LayerNorm(size, _EPS, build, affine=affine)
        activation = check_activation(config.activation_function, "activation_function")
        self.mlp = FeedForward(size, config.ffn_dim, activation, build, bias=config.enable_bias)
        self.norm_before = config.do_layer_norm_before

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        inside = self.attention_norm(hidden) if self.norm_before else hidden
        mixed, cache = self.attention(inside, shared, cache, ref, attend)
        hidden = hidden + mixed
        if self.norm_before:
            return hidden + self.mlp(self.mlp_norm(hidden), shared.live_rows), cache
        hidden = self.attention_norm(hidden)
        return self.mlp_norm(hidden + self.mlp(hidden, shared.live_rows)), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer, out_name="out_proj")
        yield from self.attention_norm.weights(("attention_norm",), f"{name}.self_attn_layer_norm", layer)
        yield from self.mlp.weights(("mlp",), name, layer)
        yield from self.mlp_norm.weights(("mlp_norm",), f"{name}.final_layer_norm", layer)


def _follow(fields: Fields) -> None:
    """Let words be as wide as the model where a file does not say."""
    if fields["word_embed_proj_dim"] is None:
        fields["word_embed_proj_dim"] = fields["hidden_size"]


_CONFIGS = {
    "opt": ConfigReader(
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None,
            "num_attention_heads": 12,
            "activation_function": "relu",
            "pad_token_id": 1,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
        rope=None,
        follow=_follow,
    ),
}
"""Reads the configs, by ``model_type``."""


class OPT(Decoder):
    """`jpaged.model_api.CausalLM` for OPT; `config` is a Hugging Face ``OPTConfig``."""

    configs = _CONFIGS

    _prefix = "model.decoder"
    _norm_name = "final_layer_norm"

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("opt",))
        size, word_size = config.hidden_size, config.word_embed_proj_dim
        if size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size={size} is not a multiple of num_attention_heads={config.num_attention_heads}"
            )
        count = config.num_attention_heads
        heads = Heads.of(count, count, size // count, build)
        kinds = (LayerKind("full"),) * config.num_hidden_layers
        groups = layer_groups(kinds, heads.layout.kv_heads, heads.head_dim, q_per_kv=heads.layout.q_per_kv)

        def make(kind: LayerKind, build: BuildContext) -> OPTLayer:
            return OPTLayer(config, heads, build)

        has_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
        affine = config.layer_norm_elementwise_affine
        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=groups,
            rotary={"full": None},
            norm=LayerNorm(size, _EPS, build, affine=affine) if has_norm else None,
            width=word_size,
        )
        positions, whole = config.max_position_embeddings + _POSITION_OFFSET, P(None, None)
        projected = word_size != size
        self.embed_positions = Embedding(positions, size, build, partition=whole)
        self.project_in = Linear(word_size, size, build, partition=whole) if projected else None
        self.project_out = Linear(size, word_size, build, partition=whole) if projected else None

    def embed(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], live_rows: LiveRows = None
    ) -> Float[Array, "tokens embed"]:
        hidden = super().embed(tokens, positions, live_rows)
        if self.project_in is not None:
            hidden = self.project_in(hidden, live_rows)
        return hidden + self.embed_positions(positions + _POSITION_OFFSET)

    def logits(self, hidden: Float[Array, "seqs embed"], live_rows: LiveRows = None) -> Float[Array, "seqs vocab"]:
        """Return the logits; the projection to the vocabulary's width happens here, for the few rows that are
        sampled."""
        if self.project_out is not None:
            hidden = self.project_out(hidden, live_rows)
        return super().logits(hidden, live_rows)

    def weights(self) -> Iterator[WeightSource]:
        positions = f"{self._prefix}.embed_positions"
        yield from self.embed_positions.weights(("embed_positions",), positions, convert.as_stored, may_quantise=False)
        for name, projection in (("project_in", self.project_in), ("project_out", self.project_out)):
            if projection is not None:
                how = convert.linear(*projection.weight.shape)
                yield from projection.weights((name,), (f"{self._prefix}.{name}",), None, how)
        yield from super().weights()

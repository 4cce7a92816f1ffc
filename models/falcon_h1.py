"""Falcon-H1 (TII, 2025): every layer has attention and a Mamba-2 next to each other, both of the same normed input.

So each layer keeps memory of two groups. Multipliers stand before and after each block, as maximal update
parametrization has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields, dense
from .decoder import Decoder, check_model_type
from .groups import layer_groups, state_groups
from .layers import GatedMLP, RMSNorm, check_activation, scaled
from .linear import LiveRows
from .pre_norm import LayerNames, PreNormLayer
from .recurrent.convolution import check_silu
from .recurrent.mamba2 import HYBRID_FIELDS, Mamba2, Mamba2Sizes, follow_head_dim
from .rope import rotary_from_config
from .stack import LayerKind, Shared

_ATTENTION, _STATE = "self_attn", "mamba"


def _follow(fields: Fields) -> None:
    """Set the width of the recurrent heads, multipliers that a file leaves out, and layer types.

    Raises:
        ValueError: heads do not make up the inner width.
    """
    inner = fields["mamba_d_ssm"]
    follow_head_dim(fields, fields["mamba_expand"] * fields["hidden_size"] if inner is None else inner)
    for name, number in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        fields[name] = [1.0] * number if fields[name] is None else fields[name]
        if len(fields[name]) != number:
            raise ValueError(f"{name} has {len(fields[name])} numbers, not {number}")
    fields["layer_types"] = ["hybrid"] * fields["num_hidden_layers"]


_CONFIGS = {
    "falcon_h1": ConfigReader(
        dense(
            vocab_size=128000,
            hidden_size=4096,
            intermediate_size=14336,
            num_key_value_heads=8,
            rms_norm_eps=1e-05,
            pad_token_id=0,
            max_position_embeddings=8192,
            mamba_d_ssm=1024,
            mamba_norm_before_gate=True,
            mamba_rms_norm=False,
            projectors_bias=False,
            attention_bias=False,
            mlp_bias=False,
            lm_head_multiplier=1.0,
            embedding_multiplier=1.0,
            mlp_multipliers=None,
            key_multiplier=1.0,
            attention_out_multiplier=1.0,
            attention_in_multiplier=1.0,
            ssm_multipliers=None,
            ssm_in_multiplier=1.0,
            ssm_out_multiplier=1.0,
            **HYBRID_FIELDS,
        ),
        follow=_follow,
    ),
}
"""Reads the configs, by ``model_type``."""


class FalconMLP(GatedMLP):
    """``down(act(gate(x) * gate_scale) * up(x)) * out_scale``."""

    def __init__(self, config: Any, activation: str, build: BuildContext):
        super().__init__(config.hidden_size, config.intermediate_size, activation, build, bias=config.mlp_bias)
        self.gate_scale, self.out_scale = map(float, config.mlp_multipliers)

    def __call__(self, x: Float[Array, "tokens embed"], live_rows: LiveRows = None) -> Float[Array, "tokens embed"]:
        return scaled(super().__call__(x, live_rows), self.out_scale)

    def _inner(self, both: Float[Array, "tokens gate_up"]) -> Float[Array, "tokens mlp"]:
        if self.gate_scale != 1.0:
            each = both.shape[-1] // (2 * self.shards)
            scales = np.tile(np.repeat((self.gate_scale, 1.0), each), self.shards)
            both = both * jnp.asarray(scales, both.dtype)
        return super()._inner(both)


class SideBySide(nnx.Module):
    """``attention(x * a) * b + mamba(x * c) * d``, with the config's multipliers.

    The reference of a layer is that of its attention; its state has the same number in the group of states, as every
    layer has both. Parameters: attention, mamba.
    """

    def __init__(self, config: Any, heads: Heads, sizes: Mamba2Sizes, build: BuildContext):
        self.attention = Attention(
            config.hidden_size,
            heads,
            build,
            scale=heads.head_dim**-0.5 * config.key_multiplier,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
        )
        self.mamba = Mamba2(sizes, build)
        self.attention_scales = float(config.attention_in_multiplier), float(config.attention_out_multiplier)
        self.mamba_scales = float(config.ssm_in_multiplier), float(config.ssm_out_multiplier)

    def __call__(
        self, x: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        (before, after), state = self.mamba_scales, LayerRef("state", ref.index)
        recurred, cache = self.mamba(scaled(x, before), shared, cache, state, attend)  # type: ignore[arg-type]
        recurred = scaled(recurred, after)
        before, after = self.attention_scales
        attended, cache = self.attention(scaled(x, before), shared, cache, ref, attend)
        return recurred + scaled(attended, after), cache

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of both blocks of the layer `name`."""
        yield from self.attention.weights((*path, "attention"), f"{name}{_ATTENTION}", layer)
        yield from self.mamba.weights((*path, "mamba"), f"{name}{_STATE}", layer)


class FalconH1(Decoder):
    """`jpaged.model_api.CausalLM` for Falcon-H1; `config` is a Hugging Face ``FalconH1Config``."""

    configs = _CONFIGS
    _norm_name = "final_layernorm"

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("falcon_h1",))
        check_silu(config.hidden_act)
        if config.mamba_proj_bias != config.projectors_bias:
            raise ValueError(
                f"mamba_proj_bias={config.mamba_proj_bias} with projectors_bias={config.projectors_bias} is not "
                "supported: the projections in and out of a Mamba-2 have biases together"
            )
        size, eps = config.hidden_size, config.rms_norm_eps
        heads = Heads.of_config(config, build)
        z, x, b, c, step = map(float, config.ssm_multipliers)
        sizes = Mamba2Sizes.of_hybrid(
            config,
            build,
            norm=None if not config.mamba_rms_norm else "then gate" if config.mamba_norm_before_gate else "gated",
            scales=None if {z, x, b, c, step} == {1.0} else (z, x, b, c, step),
        )
        kinds = (LayerKind("full"),) * config.num_hidden_layers
        activation = check_activation(config.hidden_act, "hidden_act")

        def make(kind: LayerKind, build: BuildContext) -> PreNormLayer:
            mixer, mlp = SideBySide(config, heads, sizes, build), FalconMLP(config, activation, build)
            names = LayerNames(mixer="", post_norm="pre_ff_layernorm", mlp="feed_forward")
            return PreNormLayer(size, eps, mixer, mlp, build, names=names)

        attention = layer_groups(kinds, heads.layout.kv_heads, heads.head_dim, q_per_kv=heads.layout.q_per_kv)
        states = state_groups((LayerKind("state"),) * len(kinds), sizes.state_parts(build))
        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=(*attention, *states),
            rotary={group.name: rotary_from_config(config, heads.head_dim) for group in attention},
            norm=RMSNorm(size, eps, build),
            logit_scale=float(config.lm_head_multiplier),
        )
        self.embed_scale = float(config.embedding_multiplier)

    def embed(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], live_rows: LiveRows = None
    ) -> Float[Array, "tokens embed"]:
        return scaled(super().embed(tokens, positions, live_rows), self.embed_scale)

"""Bamba (IBM, 2024): Mamba-2 layers, and a few of attention that rotates half of each head; all with an MLP."""

from __future__ import annotations

from typing import Any

from jpaged.model_api import BuildContext

from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields, Rope, dense
from .decoder import Decoder, check_model_type
from .groups import kinds_from_types, layer_groups, state_groups
from .layers import GatedMLP, RMSNorm, check_activation
from .pre_norm import LayerNames, PreNormLayer
from .recurrent.convolution import check_silu
from .recurrent.mamba2 import Mamba2, Mamba2Sizes
from .recurrent.slots import Slots
from .rope import rotary_from_config
from .stack import LayerKind

_NAMES = {
    group: LayerNames("input_layernorm", mixer, "pre_ff_layernorm", "feed_forward")
    for group, mixer in (("full", "self_attn"), ("state", "mamba"))
}


def _follow(fields: Fields) -> None:
    """Set which layers attend, and the recurrent heads' width.

    Raises:
        ValueError: heads do not make up the inner width.
    """
    inner, heads = fields["mamba_expand"] * fields["hidden_size"], fields["mamba_n_heads"]
    if fields["mamba_d_head"] == "auto":
        fields["mamba_d_head"] = inner // heads
    if fields["mamba_d_head"] * heads != inner:
        raise ValueError(f"mamba_d_head={fields['mamba_d_head']} * mamba_n_heads={heads} is not {inner}")
    attends, layers = fields["attn_layer_indices"] or (), range(fields["num_hidden_layers"])
    fields["layer_types"] = ["full_attention" if number in attends else "linear_attention" for number in layers]


_CONFIGS = {
    "bamba": ConfigReader(
        dense(
            vocab_size=128000,
            intermediate_size=14336,
            num_key_value_heads=8,
            rms_norm_eps=1e-05,
            pad_token_id=0,
            max_position_embeddings=262144,
            attn_layer_indices=None,
            mamba_n_heads=128,
            mamba_d_head="auto",
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_conv_bias=True,
            mamba_proj_bias=False,
            time_step_limit=(0.0, float("inf")),
            attention_bias=False,
            mlp_bias=False,
        ),
        rope=Rope(rotated=0.5),
        follow=_follow,
    ),
}
"""Reads the configs, by ``model_type``."""


class Bamba(Decoder):
    """`jpaged.model_api.CausalLM` for Bamba; `config` is a Hugging Face ``BambaConfig``."""

    configs = _CONFIGS

    _norm_name = "final_layernorm"

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("bamba",))
        check_silu(config.hidden_act)
        size, eps = config.hidden_size, config.rms_norm_eps
        head_dim = getattr(config, "head_dim", None) or size // config.num_attention_heads
        heads = Heads.of(config.num_attention_heads, config.num_key_value_heads, head_dim, build)
        said = "mamba_n_heads and mamba_n_groups"
        sizes = Mamba2Sizes(
            embed=size,
            head_dim=config.mamba_d_head,
            state=config.mamba_d_state,
            conv_width=config.mamba_d_conv,
            conv_bias=config.mamba_conv_bias,
            proj_bias=config.mamba_proj_bias,
            eps=eps,
            step_limits=tuple(config.time_step_limit),
            slots=Slots.of(config.mamba_n_heads, config.mamba_n_groups, build.tensor_parallel, said),
        )
        kinds = kinds_from_types(config, local="linear_attention")

        def mixer(kind: LayerKind, build: BuildContext) -> Attention | Mamba2:
            if kind.group == "state":
                return Mamba2(sizes, build)
            bias = config.attention_bias
            return Attention(size, heads, build, scale=head_dim**-0.5, qkv_bias=bias, out_bias=bias)

        def make(kind: LayerKind, build: BuildContext) -> PreNormLayer:
            activation = check_activation(config.hidden_act, "hidden_act")
            mlp = GatedMLP(size, config.intermediate_size, activation, build, bias=config.mlp_bias)
            assert kind.group is not None
            return PreNormLayer(size, eps, mixer(kind, build), mlp, build, names=_NAMES[kind.group])

        attention = layer_groups(kinds, heads.layout.kv_heads, head_dim, q_per_kv=heads.layout.q_per_kv)
        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=(*attention, *state_groups(kinds, sizes.state_parts(build))),
            rotary={group.name: rotary_from_config(config, head_dim, partial=True) for group in attention},
            norm=RMSNorm(size, eps, build),
        )

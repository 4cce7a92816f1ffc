"""Bamba (IBM, 2024): Mamba-2 layers, and a few of attention that rotates half of each head; all with an MLP.

Granite 4 (IBM, 2025) has four multipliers, may have experts next to an MLP that all tokens share, and mostly knows no
positions in attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxtyping import Array, Float, Int

from jpaged.model_api import BuildContext, WeightSource

from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields, Rope, dense
from .decoder import Decoder, check_model_type
from .experts import ExpertsSpec, SparseMLP, SparseNames
from .groups import kinds_from_types, layer_groups, state_groups
from .layers import GatedMLP, RMSNorm, check_activation, scaled
from .linear import LiveRows
from .pre_norm import LayerNames, PreNormLayer
from .recurrent.convolution import check_silu
from .recurrent.mamba2 import HYBRID_FIELDS, Mamba2, Mamba2Sizes, follow_head_dim
from .rope import Rotary, rotary_from_config
from .routing import Routing
from .stack import LayerKind

_MIXERS = (("full", "self_attn"), ("state", "mamba"))
_NAMES = {
    "bamba": {g: LayerNames("input_layernorm", mixer, "pre_ff_layernorm", "feed_forward") for g, mixer in _MIXERS},
    "granitemoehybrid": {g: LayerNames("input_layernorm", mixer, mlp="") for g, mixer in _MIXERS},
}
_SHARED, _SHARED_PARTS = "shared_mlp", ("input_linear", "output_linear")


class GraniteMLP(GatedMLP):
    """`GatedMLP` under the names of Granite 4's checkpoints."""

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:  # type: ignore[override]
        yield from super().weights(path, f"{name}.{_SHARED}", layer, names=_SHARED_PARTS)


def _granite_mlp(config: Any, activation: str, build: BuildContext) -> GatedMLP | SparseMLP:
    """Return Granite 4's MLP, next to experts where it has some."""
    if not config.num_local_experts:
        return GraniteMLP(config.hidden_size, config.shared_intermediate_size, activation, build, bias=False)
    experts = ExpertsSpec(
        config.num_local_experts,
        config.intermediate_size,
        Routing(config.num_experts_per_tok, sums_to_one=True),
        shared_width=config.shared_intermediate_size,
        names=SparseNames("mlp.router", "mlp.experts", _SHARED, shared_parts=_SHARED_PARTS),
    )
    return experts.make(config.hidden_size, activation, build)


def _follow(fields: Fields) -> None:
    """Set which layers attend, and the recurrent heads' width.

    Raises:
        ValueError: heads do not make up the inner width.
    """
    follow_head_dim(fields, fields["mamba_expand"] * fields["hidden_size"])
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
            attention_bias=False,
            mlp_bias=False,
            **HYBRID_FIELDS,
        ),
        rope=Rope(rotated=0.5),
        follow=_follow,
    ),
}
"""Reads the configs, by ``model_type``."""


class Bamba(Decoder):
    """`jpaged.model_api.CausalLM` for both; `config` is a Hugging Face ``BambaConfig`` or
    ``GraniteMoeHybridConfig``."""

    configs = _CONFIGS

    reads_separate_experts = True
    """Reads each expert's tensors by names of their own; a checkpoint may hold those of all experts in one."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("bamba", "granitemoehybrid"))
        check_silu(config.hidden_act)
        granite, size, eps = config.model_type == "granitemoehybrid", config.hidden_size, config.rms_norm_eps
        self._norm_name = "norm" if granite else "final_layernorm"
        self._has_experts = granite and config.num_local_experts > 0
        heads = Heads.of_config(config, build)
        sizes = Mamba2Sizes.of_hybrid(config, build)
        kinds = kinds_from_types(config, local="linear_attention")
        activation = check_activation(config.hidden_act, "hidden_act")

        def mixer(kind: LayerKind, build: BuildContext) -> Attention | Mamba2:
            if kind.group == "state":
                return Mamba2(sizes, build)
            scale = config.attention_multiplier if granite else heads.head_dim**-0.5
            bias = config.attention_bias
            return Attention(size, heads, build, scale=scale, qkv_bias=bias, out_bias=bias)

        def make(kind: LayerKind, build: BuildContext) -> PreNormLayer:
            if granite:
                mlp = _granite_mlp(config, activation, build)
            else:
                mlp = GatedMLP(size, config.intermediate_size, activation, build, bias=config.mlp_bias)
            assert kind.group is not None
            return PreNormLayer(
                size,
                eps,
                mixer(kind, build),
                mlp,
                build,
                names=_NAMES[config.model_type][kind.group],
                residual_scale=config.residual_multiplier if granite else 1.0,
            )

        attention = layer_groups(kinds, heads.layout.kv_heads, heads.head_dim, q_per_kv=heads.layout.q_per_kv)
        rotary: Rotary | None = None
        if not granite or config.position_embedding_type == "rope":
            rotary = rotary_from_config(config, heads.head_dim, partial=not granite)
        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=(*attention, *state_groups(kinds, sizes.state_parts(build))),
            rotary={group.name: rotary for group in attention},
            norm=RMSNorm(size, eps, build),
            logit_scale=1 / config.logits_scaling if granite else None,
        )
        self.embed_scale = config.embedding_multiplier if granite else 1.0

    def embed(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], live_rows: LiveRows = None
    ) -> Float[Array, "tokens embed"]:
        return scaled(super().embed(tokens, positions, live_rows), self.embed_scale)

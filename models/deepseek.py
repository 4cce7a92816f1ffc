"""DeepSeek-V2 and V3 (2024): attention to latents, and mixtures of many small experts with shared ones.

V2 weighs experts by a softmax over all of them, V3 by sigmoids, corrected by a bias to choose and normalised to weigh;
both may choose among the experts of a few groups only. The first layers have a plain MLP. GLM-4.7-Flash (Z.ai, 2026) is
V3 with another list of layers; Mistral 4 (Mistral AI, 2026) weighs experts by a normalised softmax, and its queries
grow with their position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Int

from jpaged.model_api import BuildContext, LatentGroup

from .config_reader import ConfigReader, Fields, dense
from .decoder import Decoder, check_model_type
from .experts import ExpertsSpec, SparseMLP
from .latent import LatentAttention, LatentHeads
from .layers import GatedMLP, RMSNorm, check_activation
from .linear import LiveRows
from .mtp import HeadNames, PredictionHead
from .pre_norm import PreNormLayer
from .rope import Rotary, query_growth, rotary_from_config, yarn_scale
from .routing import Routing, sigmoid_routing
from .stack import LayerKind, MakeLayer, Shared

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, which the config does not say."""


def _routing(config: Any) -> Routing:
    """Return how experts are chosen.

    Raises:
        ValueError: the config asks for a method that is not implemented.
    """
    if config.model_type == "mistral4":
        return replace(sigmoid_routing(config), scores="softmax")
    if config.model_type != "deepseek_v2":
        return sigmoid_routing(config)
    per_token, scale = config.num_experts_per_tok, config.routed_scaling_factor
    if config.norm_topk_prob:
        raise ValueError(f"norm_topk_prob={config.norm_topk_prob} is not supported for deepseek_v2; only False")
    if config.topk_method == "greedy":
        return Routing(per_token, scale=scale)
    if config.topk_method == "group_limited_greedy":
        groups, chosen = config.n_group or 1, config.topk_group or 1
        return Routing(per_token, scale=scale, groups=groups, groups_chosen=chosen)
    raise ValueError(f"topk_method={config.topk_method!r} is not supported; known: greedy, group_limited_greedy")


def _follow(fields: Fields) -> None:
    """Set the width of a head that is rotated, and of all of it."""
    fields["head_dim"] = fields["qk_rope_head_dim"]
    fields["qk_head_dim"] = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]


_CONFIGS = {
    "deepseek_v2": ConfigReader(
        dense(
            vocab_size=102400,
            intermediate_size=11008,
            max_position_embeddings=2048,
            rms_norm_eps=1e-06,
            attention_bias=False,
            mlp_bias=False,
            head_dim=None,
            first_k_dense_replace=0,
            kv_lora_rank=512,
            q_lora_rank=1536,
            n_group=None,
            n_routed_experts=64,
            n_shared_experts=2,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            routed_scaling_factor=1.0,
            topk_group=None,
            topk_method="greedy",
            norm_topk_prob=False,
            v_head_dim=128,
            num_experts_per_tok=None,
            moe_intermediate_size=1407,
        ),
        follow=_follow,
        same=(("num_experts", "n_routed_experts"),),
    ),
    "deepseek_v3": ConfigReader(
        dense(
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_hidden_layers=61,
            num_attention_heads=128,
            num_key_value_heads=128,
            n_shared_experts=1,
            n_routed_experts=256,
            routed_scaling_factor=2.5,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_rope_head_dim=64,
            v_head_dim=128,
            qk_nope_head_dim=128,
            n_group=8,
            topk_group=4,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
            norm_topk_prob=True,
            max_position_embeddings=4096,
            rms_norm_eps=1e-06,
            bos_token_id=0,
            eos_token_id=1,
            rope_interleave=True,
            attention_bias=False,
            num_nextn_predict_layers=1,
        ),
        follow=_follow,
        same=(("num_local_experts", "n_routed_experts"), ("num_mtp_layers", "num_nextn_predict_layers")),
    ),
}
"""Reads the configs, by ``model_type``."""


def _kinds(config: Any) -> tuple[LayerKind, ...]:
    """Return each layer's kind; its variant says whether its MLP has experts."""
    layers = range(config.num_hidden_layers)
    if config.model_type == "glm4_moe_lite":
        sparse = [kind == "sparse" for kind in config.mlp_layer_types]
    else:
        sparse = [layer >= config.first_k_dense_replace for layer in layers]
    return tuple(LayerKind("full", "experts" if sparse[layer] else "dense") for layer in layers)


@dataclass(frozen=True)
class _Parts:
    """Holds what the layers of a model or its head are built of.

    Attributes:
        memory: what one layer keeps.
        make: builds a layer.
    """

    memory: LatentGroup
    rotary: Rotary
    make: MakeLayer

    @classmethod
    def of(cls, config: Any, build: BuildContext) -> _Parts:
        second, size, eps = config.model_type == "deepseek_v2", config.hidden_size, config.rms_norm_eps
        activation = check_activation(config.hidden_act, "hidden_act")
        rotary, biased = config.qk_rope_head_dim, second and config.mlp_bias
        heads = LatentHeads.of(
            config.num_attention_heads,
            build,
            rank=config.kv_lora_rank,
            query_rank=config.q_lora_rank,
            plain=config.qk_nope_head_dim,
            rotary=rotary,
            value=config.v_head_dim,
            rotates_neighbours=second or config.rope_interleave,
        )
        experts = ExpertsSpec(
            config.n_routed_experts,
            config.moe_intermediate_size,
            _routing(config),
            corrected=config.model_type in ("deepseek_v3", "glm4_moe_lite"),
            shared_width=config.moe_intermediate_size * config.n_shared_experts,
            shared_bias=biased,
        )

        def make_mlp(kind: LayerKind, build: BuildContext) -> GatedMLP | SparseMLP:
            if kind.variant == "experts":
                return experts.make(size, activation, build)
            return GatedMLP(size, config.intermediate_size, activation, build, bias=biased)

        def make(kind: LayerKind, build: BuildContext) -> PreNormLayer:
            scale = (heads.plain + rotary) ** -0.5 * yarn_scale(config) ** 2
            attention = LatentAttention(size, heads, build, scale=scale, eps=_LATENT_EPS, bias=config.attention_bias)
            return PreNormLayer(size, eps, attention, make_mlp(kind, build), build)

        # Mistral 4 says which part of a whole head is rotated, the others the size of the part.
        whole = heads.plain + rotary if config.model_type == "mistral4" else rotary
        frequencies = rotary_from_config(config, whole, partial=whole != rotary)
        return cls(LatentGroup("full", (0,), config.kv_lora_rank, rotary, heads.slots), frequencies, make)


class DeepSeek(Decoder):
    """`jpaged.model_api.CausalLM` for these; `config` is a Hugging Face ``DeepseekV2Config``, ``DeepseekV3Config``,
    ``Glm4MoeLiteConfig`` or ``Mistral4Config``."""

    configs = _CONFIGS

    _has_experts = True
    reads_separate_experts = True
    """Reads each expert's tensors by names of their own; a checkpoint may hold those of all experts in one."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"))
        parts, kinds = _Parts.of(config, build), _kinds(config)
        super().__init__(
            config,
            build,
            kinds,
            parts.make,
            groups=(replace(parts.memory, layers=tuple(range(len(kinds)))),),
            rotary={"full": parts.rotary},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, build),
        )
        self.growth = query_growth(config.rope_parameters) if config.model_type == "mistral4" else None

    def shared(self, positions: Int[Array, " tokens"], live_rows: LiveRows) -> Shared:
        shared = super().shared(positions, live_rows)
        return shared if self.growth is None else replace(shared, growth={"full": self.growth.factors(positions)})

    @staticmethod
    def draft_head(config: Any, build: BuildContext) -> PredictionHead:
        """See `jpaged.model_api.HasDraftHead`; DeepSeek-V3 and GLM-4.7-Flash have one."""
        if config.model_type not in ("deepseek_v3", "glm4_moe_lite"):
            raise ValueError(f"models of model_type={config.model_type!r} have no head that predicts further tokens")
        parts = _Parts.of(config, build)
        return PredictionHead(
            config,
            build,
            parts.make,
            memory=parts.memory,
            variant="experts",
            rotary=parts.rotary,
            names=HeadNames.of_further_layer(config),
        )

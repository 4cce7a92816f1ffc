"""Mixtral (Jiang et al., 2024) and Qwen3-MoE (Qwen Team, 2025): Llama's layers with a mixture of experts for an MLP.

Mixtral's attention is Mistral's, and a token's experts share it by the softmax of their own scores. Qwen3-MoE norms
queries and keys, takes the scores' softmax over all experts, and may keep plain MLPs in some layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jpaged.model_api import BuildContext

from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields, Rope, dense, windows_after
from .decoder import Decoder, check_model_type
from .experts import ExpertsSpec, SparseMLP
from .groups import layer_groups
from .layers import GatedMLP, RMSNorm, check_activation
from .pre_norm import PreNormLayer
from .rope import rotary_from_config
from .routing import Routing
from .stack import LayerKind


def _is_sparse(config: Any, layer: int) -> bool:
    """Tell whether a layer has experts."""
    if config.model_type == "mixtral":
        return True
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0


def _qwen3_moe(fields: Fields) -> None:
    windows_after(fields)
    if fields["mlp_only_layers"] is None:
        fields["mlp_only_layers"] = []


_CONFIGS = {
    "mixtral": ConfigReader(
        dense(
            vocab_size=32000,
            intermediate_size=14336,
            num_key_value_heads=8,
            head_dim=None,
            max_position_embeddings=131072,
            rms_norm_eps=1e-05,
            sliding_window=None,
            num_experts_per_tok=2,
            num_local_experts=8,
        ),
        rope=Rope(1000000.0),
        same=(("num_experts", "num_local_experts"),),
    ),
    "qwen3_moe": ConfigReader(
        dense(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=24,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            rms_norm_eps=1e-06,
            attention_bias=False,
            use_sliding_window=False,
            sliding_window=4096,
            decoder_sparse_step=1,
            moe_intermediate_size=768,
            num_experts_per_tok=8,
            num_experts=128,
            norm_topk_prob=False,
            mlp_only_layers=None,
            bos_token_id=None,
            eos_token_id=None,
        ),
        follow=_qwen3_moe,
        same=(("num_experts", "num_local_experts"),),
    ),
}
"""Reads the configs, by ``model_type``."""


class Mixtral(Decoder):
    """`jpaged.model_api.CausalLM` for both; `config` is a Hugging Face ``MixtralConfig`` or ``Qwen3MoeConfig``."""

    configs = _CONFIGS

    _has_experts = True
    reads_separate_experts = True
    """Reads each expert's tensors by names of their own; a checkpoint may hold those of all experts in one."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("mixtral", "qwen3_moe"))
        qwen, size, eps = config.model_type == "qwen3_moe", config.hidden_size, config.rms_norm_eps
        activation = check_activation(config.hidden_act, "hidden_act")
        heads = Heads.of_config(config, build)
        group = "full" if config.sliding_window is None else "window"
        kinds = tuple(
            LayerKind(group, "experts" if _is_sparse(config, layer) else "dense")
            for layer in range(config.num_hidden_layers)
        )
        experts = ExpertsSpec(
            config.num_experts,
            config.moe_intermediate_size if qwen else config.intermediate_size,
            Routing(config.num_experts_per_tok, sums_to_one=not qwen or config.norm_topk_prob),
        )
        biased = qwen and config.attention_bias

        def make_mlp(kind: LayerKind, build: BuildContext) -> GatedMLP | SparseMLP:
            if kind.variant == "dense":
                return GatedMLP(size, config.intermediate_size, activation, build, bias=False)
            return experts.make(size, activation, build)

        def make(kind: LayerKind, build: BuildContext) -> PreNormLayer:
            attention = Attention(
                size,
                heads,
                build,
                scale=heads.head_dim**-0.5,
                qkv_bias=biased,
                out_bias=biased,
                qk_norm=partial(RMSNorm, heads.head_dim, eps, build) if qwen else None,
            )
            return PreNormLayer(size, eps, attention, make_mlp(kind, build), build)

        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=layer_groups(
                kinds, heads.layout.kv_heads, heads.head_dim, config.sliding_window, q_per_kv=heads.layout.q_per_kv
            ),
            rotary={group: rotary_from_config(config, heads.head_dim)},
            norm=RMSNorm(size, eps, build),
        )

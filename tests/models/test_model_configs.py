"""Published models have their published sizes; configs that ask for what is missing are refused by name."""

import copy
import math

import jax.numpy as jnp
import pytest
from checkpoints import CHECKPOINTS
from dense_model import abstract
from flax import nnx
from transformers import (
    BambaConfig,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from jpaged.model_api import AttentionGroup, BuildContext, LatentGroup
from jpaged_models.routing import Router

PUBLISHED = {
    "Llama-2-7B": (LlamaConfig(vocab_size=32000), 6_738_415_616),
    "Llama-3.1-8B": (
        LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8),
        8_030_261_248,
    ),
    "SmolLM2-135M": (
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        ),
        134_515_008,
    ),
    "Mistral-7B": (MistralConfig(), 7_241_732_096),
    "Qwen2.5-0.5B": (
        Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        ),
        596_049_920,
    ),
    "OPT-125M": (OPTConfig(), 125_239_296),
    "OPT-350M": (
        OPTConfig(
            hidden_size=1024,
            ffn_dim=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            do_layer_norm_before=False,
            word_embed_proj_dim=512,
        ),
        331_196_416,
    ),
    "Gemma-2-2B": (Gemma2Config(), 2_614_341_888),
    "Gemma-3-1B": (
        Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=1152,
            intermediate_size=6912,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            sliding_window=512,
        ),
        999_885_952,
    ),
    "Command-R7B": (
        Cohere2Config(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        8_028_033_024,
    ),
    "GPT-OSS-20B": (GptOssConfig(num_hidden_layers=24, num_local_experts=32), 20_914_757_184),
    "Llama-4-Scout": (Llama4TextConfig(), 107_769_861_120),
    "Ministral-8B": (
        MinistralConfig(
            vocab_size=131072,
            intermediate_size=12288,
            num_hidden_layers=36,
            head_dim=128,
            sliding_window=32768,
        ),
        8_019_808_256,
    ),
    "Mixtral-8x7B": (MixtralConfig(), 46_702_792_704),
    "Qwen3-30B-A3B": (Qwen3MoeConfig(num_hidden_layers=48, head_dim=128), 30_532_122_624),
    "OLMo-3-7B": (Olmo3Config(vocab_size=100278), 7_298_011_136),
    "DeepSeek-V2-Lite": (
        DeepseekV2Config(
            hidden_size=2048,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            num_hidden_layers=27,
            num_attention_heads=16,
            q_lora_rank=None,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
        ),
        15_706_484_224,
    ),
    "DeepSeek-V3": (DeepseekV3Config(), 671_026_419_200),
    "Jamba-v0.1": (JambaConfig(tie_word_embeddings=False), 51_570_323_328),
    "Bamba-9B": (
        BambaConfig(
            vocab_size=128256,
            attn_layer_indices=[9, 18, 27],
            mamba_n_heads=128,
            mamba_d_state=128,
            tie_word_embeddings=False,
        ),
        9_780_235_392,
    ),
    "Mamba-Codestral-7B": (Mamba2Config(), 7_285_403_648),
    "Qwen3-Next-80B-A3B": (Qwen3NextConfig(), 79_674_391_296),
    "LFM2-1.2B": (
        Lfm2Config(
            hidden_size=2048, intermediate_size=12288, num_hidden_layers=16, full_attn_idxs=[2, 5, 8, 10, 12, 14]
        ),
        1_170_340_608,
    ),
}


SLOW = {("Qwen3-Next-80B-A3B", False), ("DeepSeek-V3", False)}
"""Names, and whether layers are stacked: with 256 or 512 experts a layer apart, a model takes seconds to describe."""


@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        pytest.param(name, stacked, marks=pytest.mark.nightly if (name, stacked) in SLOW else ())
        for name in PUBLISHED
        for stacked in (False, True)
    ],
)
def test_published_models_have_their_published_number_of_parameters(name, stacked):
    config, count = PUBLISHED[name]
    state = nnx.state(abstract(config, stacked=stacked))
    assert sum(math.prod(var.shape) for _, var in nnx.to_flat_state(state)) == count


def test_layer_groups_follow_the_layer_types():
    assert abstract(CHECKPOINTS["gemma2"]).layer_groups == (
        AttentionGroup("window", (0, 2, 4), 2, 48, 7),
        AttentionGroup("full", (1, 3), 2, 48),
    )
    assert abstract(CHECKPOINTS["gemma3"]).layer_groups == (
        AttentionGroup("window", (0, 1, 2, 3, 4, 6, 7), 2, 64, 7),
        AttentionGroup("full", (5,), 2, 64),
    )
    assert abstract(CHECKPOINTS["llama4"]).layer_groups == (
        AttentionGroup("chunk", (0, 1, 2, 4, 5, 6), 2, 64, chunk_size=11),
        AttentionGroup("full", (3, 7), 2, 64),
    )
    assert abstract(CHECKPOINTS["ministral"]).layer_groups == (
        AttentionGroup("window", (1, 2, 3), 2, 128, 7),
        AttentionGroup("full", (0,), 2, 128),
    )
    assert abstract(CHECKPOINTS["qwen2-window"]).layer_groups == (
        AttentionGroup("window", (2, 3), 2, 16, 7),
        AttentionGroup("full", (0, 1), 2, 16),
    )
    assert abstract(CHECKPOINTS["llama-shared-kv"]).layer_groups == (AttentionGroup("full", (0, 3), 2, 48, readers=3),)
    assert abstract(CHECKPOINTS["ministral-shared-kv"]).layer_groups == (
        AttentionGroup("window", (0, 2, 5), 2, 48, 7, readers=3),
        AttentionGroup("full", (3,), 2, 48, readers=1),
    )
    assert abstract(CHECKPOINTS["mistral-window"]).layer_groups == (AttentionGroup("window", (0, 1, 2), 2, 48, 7),)
    assert abstract(CHECKPOINTS["olmo3"]).layer_groups == (
        AttentionGroup("window", (0, 1, 2, 4), 2, 48, 7),
        AttentionGroup("full", (3,), 2, 48),
    )
    assert abstract(CHECKPOINTS["gemma4"]).layer_groups == (
        AttentionGroup("window", (0, 1, 3), 3, 48, 7, readers=1),
        AttentionGroup("full", (2,), 3, 64, readers=1),
    )
    assert abstract(CHECKPOINTS["deepseek_v3"], tensor_parallel=4).layer_groups == (
        LatentGroup("full", (0, 1, 2), 46, 14),
    )
    assert abstract(CHECKPOINTS["qwen2"]).layer_groups == (AttentionGroup("full", (0, 1, 2, 3), 2, 16),)


def test_layer_groups_count_kv_heads_as_laid_out_over_shards():
    (group,) = abstract(CHECKPOINTS["llama"], tensor_parallel=4).layer_groups
    assert group.kv_heads == 4


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "hidden_act", "mish"),
        ("llama", "num_key_value_heads", 4),
        ("llama", "rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}),
        ("llama", "rope_parameters", {"partial_rotary_factor": 0.5, "rope_theta": 1e4}),
        ("llama", "head_dim", 15),
        ("llama-shared-kv", "cla_share_factor", 0),
        ("llama-shared-kv", "cla_share_factor", None),
        ("mistral-window", "sliding_window", 0),
        ("qwen2-window", "sliding_window", None),
        ("qwen2", "layer_types", ["full_attention"]),
        ("qwen3", "layer_types", ["chunked_attention"] * 4),
        ("opt", "activation_function", "mish"),
        ("opt", "num_attention_heads", 7),
        ("gemma2", "hidden_activation", "mish"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "sliding_window", None),
        ("cohere2", "hidden_act", "mish"),
        ("cohere2", "use_parallel_block", False),
        ("cohere2", "use_qk_norm", True),
        ("cohere2", "rotary_pct", 0.5),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 5),
        ("gpt_oss", "sliding_window", None),
        ("llama4", "hidden_act", "mish"),
        ("llama4", "attention_chunk_size", None),
        ("llama4", "no_rope_layers", [1] * 8),
        ("llama4", "layer_types", ["sliding_attention"] * 8),
        ("ministral", "layer_types", ["chunked_attention"] * 4),
        ("mixtral", "hidden_act", "mish"),
        ("mixtral", "num_experts_per_tok", 6),
        ("olmo3", "layer_types", ["chunked_attention"] * 5),
        ("gemma4", "use_bidirectional_attention", "all"),
        ("gemma4", "num_kv_shared_layers", 6),
        ("gemma4", "hidden_activation", "mish"),
        ("gemma4-experts", "top_k_experts", 6),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v3", "n_group", 4),
        ("deepseek_v3", "topk_group", 4),
        ("deepseek_v3", "num_experts_per_tok", 5),
        ("deepseek_v3", "qk_rope_head_dim", 13),
        ("llama-shared-kv", "is_causal", False),
        ("llama4", "is_causal", False),
        ("deepseek_v2", "is_causal", False),
        ("mamba2", "is_causal", False),
    ],
)
def test_an_unsupported_field_is_named(name, field, value):
    config = copy.deepcopy(CHECKPOINTS[name])
    object.__setattr__(config, field, value)
    named = {
        "num_key_value_heads": "num_kv_heads",
        "qk_rope_head_dim": "head_dim",
        "top_k_experts": "num_experts_per_tok",
    }.get(field, field)
    if field == "rope_parameters":
        named = "rope_type='longrope'" if "rope_type" in value else "partial_rotary_factor=0.5"
    with pytest.raises(ValueError, match=named):
        abstract(config)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_groups_of_experts_that_are_null_are_none(name):
    config = copy.deepcopy(CHECKPOINTS[name])
    for field in ("n_group", "topk_group"):
        object.__setattr__(config, field, None)
    found = {node.routing for _, node in nnx.iter_graph(abstract(config)) if isinstance(node, Router)}
    assert [(each.groups, each.groups_chosen, each.best_of_group) for each in found] == [(1, 1, 1)]
    object.__setattr__(config, "num_experts_per_tok", None)
    with pytest.raises(ValueError, match="num_experts_per_tok is null"):
        abstract(config)


@pytest.mark.parametrize(
    "name",
    ["llama", "opt", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "llama4_text", "mixtral", "olmo3", "deepseek_v3"],
)
def test_a_config_of_another_model_type_is_refused(name):
    from dense_model import family

    class Other:
        model_type = "other"

    with pytest.raises(ValueError, match="model_type='other'"):
        family(name)(Other(), BuildContext(dtype=jnp.dtype(jnp.float32)))

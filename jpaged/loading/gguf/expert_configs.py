"""Makes the configs of models with a mixture of experts from GGUF metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jpaged.loading.gguf.fields import field, transformer
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.hugging_face import transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def mixtral(file: GGUFFile) -> PretrainedConfig:
    """Return the config of architecture ``llama`` with experts."""
    return transformers().MixtralConfig(
        **transformer(file),
        num_local_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
        sliding_window=None,
    )


def qwen3_moe(file: GGUFFile) -> PretrainedConfig:
    """Return the config of architecture ``qwen3moe``, in which every layer has experts."""
    return transformers().Qwen3MoeConfig(
        **transformer(file),
        moe_intermediate_size=field(file, "expert_feed_forward_length"),
        num_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
        norm_topk_prob=True,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
    )


def llama4(file: GGUFFile) -> PretrainedConfig:
    """Return the config of architecture ``llama4``.

    Metadata lacks the chunk, the growth of queries and which layers rotate: Meta's values are taken, as by llama.cpp,
    unless the file has the first two. Queries are normed except with 128 experts (Maverick).
    """
    fields: dict[str, Any] = transformer(file)
    layers, experts = fields["num_hidden_layers"], field(file, "expert_count")
    rotates = [int((number + 1) % 4 != 0) for number in range(layers)]
    return transformers().Llama4TextConfig(
        **(fields | {"intermediate_size": field(file, "expert_feed_forward_length")}),
        intermediate_size_mlp=fields["intermediate_size"],
        num_local_experts=experts,
        num_experts_per_tok=field(file, "expert_used_count"),
        interleave_moe_layer_step=field(file, "interleave_moe_layer_step"),
        moe_layers=[number for number in range(layers) if f"blk.{number}.ffn_gate_inp.weight" in file.tensors],
        no_rope_layers=rotates,
        layer_types=["chunked_attention" if rotated else "full_attention" for rotated in rotates],
        attention_chunk_size=field(file, "attention.sliding_window", 8192),
        use_qk_norm=experts != 128,
        attn_temperature_tuning=True,
        floor_scale=field(file, "attention.temperature_length", 8192),
        attn_scale=field(file, "attention.temperature_scale", 0.1),
    )


def gpt_oss(file: GGUFFile) -> PretrainedConfig:
    """Return the config of architecture ``gpt-oss``: local and global layers in turn, the first one local."""
    fields: dict[str, Any] = transformer(file)
    layers = fields["num_hidden_layers"]
    return transformers().GptOssConfig(
        **(fields | {"intermediate_size": field(file, "expert_feed_forward_length")}),
        num_local_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
        sliding_window=field(file, "attention.sliding_window"),
        layer_types=[("sliding_attention", "full_attention")[number % 2] for number in range(layers)],
        attention_bias=True,
    )

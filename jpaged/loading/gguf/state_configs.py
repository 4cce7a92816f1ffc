"""Makes the configs of models with state-space or convolution layers from GGUF metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jpaged.loading.gguf.fields import every_model, field, shortest, transformer
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.hugging_face import transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def mamba2(file: GGUFFile) -> PretrainedConfig:
    """Return the config of architecture ``mamba2``."""
    fields = every_model(file)
    del fields["max_position_embeddings"]  # a state has no limit
    inner, heads = field(file, "ssm.inner_size"), field(file, "ssm.time_step_rank")
    return transformers().Mamba2Config(
        **fields,
        expand=inner // fields["hidden_size"],
        num_heads=heads,
        head_dim=inner // heads,
        state_size=field(file, "ssm.state_size"),
        n_groups=field(file, "ssm.group_count"),
        conv_kernel=field(file, "ssm.conv_kernel"),
        use_conv_bias="blk.0.ssm_conv1d.bias" in file.tensors,
        use_bias="blk.0.ssm_in.bias" in file.tensors,
        layer_norm_epsilon=shortest(field(file, "attention.layer_norm_rms_epsilon")),
    )


def jamba(file: GGUFFile) -> PretrainedConfig:
    """Return the config of architecture ``jamba``; the tensors say which layers attend and which have experts."""
    fields: dict[str, Any] = transformer(file, rotates=False)
    del fields["head_dim"]
    layers = range(fields["num_hidden_layers"])
    attends = [number for number in layers if f"blk.{number}.attn_q.weight" in file.tensors]
    mixed = [number for number in layers if f"blk.{number}.ffn_gate_inp.weight" in file.tensors]
    attention, experts = _every(file, attends, len(layers)), _every(file, mixed, len(layers))
    return transformers().JambaConfig(
        **fields,
        attn_layer_period=attention[0],
        attn_layer_offset=attention[1],
        expert_layer_period=experts[0],
        expert_layer_offset=experts[1],
        num_experts=field(file, "expert_count", 0) or 1,
        num_experts_per_tok=field(file, "expert_used_count", 0) or 1,
        mamba_d_state=field(file, "ssm.state_size"),
        mamba_d_conv=field(file, "ssm.conv_kernel"),
        mamba_expand=field(file, "ssm.inner_size") // fields["hidden_size"],
        mamba_dt_rank=field(file, "ssm.time_step_rank"),
        mamba_conv_bias=any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        mamba_proj_bias=any(name.endswith("ssm_in.bias") for name in file.tensors),
    )


def _every(file: GGUFFile, numbers: Sequence[int], layers: int) -> tuple[int, int]:
    """Return period and offset of the layers with these numbers; with none of them, a period that meets no layer."""
    if not numbers:
        return layers + 1, layers
    period = numbers[1] - numbers[0] if len(numbers) > 1 else max(layers - numbers[0], numbers[0] + 1)
    if list(numbers) != list(range(numbers[0], layers, period)) or numbers[0] >= period:
        raise ValueError(f"{file.path}: layers {list(numbers)} of {layers} are not every n-th one; not supported")
    return period, numbers[0]


def lfm2(file: GGUFFile) -> PretrainedConfig:
    """Return the config of architecture ``lfm2``; layers without KV heads are short convolutions."""
    fields: dict[str, Any] = transformer(file)
    eps, head_dim, embed = fields.pop("rms_norm_eps"), fields.pop("head_dim"), fields["hidden_size"]
    if head_dim * fields["num_attention_heads"] != embed:
        raise ValueError(f"{file.path}: lfm2.attention.key_length={head_dim} is not embedding_length / head_count")
    heads = field(file, "attention.head_count_kv")
    by_layer = heads if isinstance(heads, list) else [heads] * fields["num_hidden_layers"]
    return transformers().Lfm2Config(
        **fields,
        norm_eps=eps,
        layer_types=["full_attention" if kv else "conv" for kv in by_layer],
        conv_L_cache=field(file, "shortconv.l_cache"),
        conv_bias=any(name.endswith("shortconv.conv.bias") for name in file.tensors),
        block_auto_adjust_ff_dim=False,
    )

"""Families read configs as transformers does: its defaults, older names of fields, and what follows from others."""

import dataclasses
import json
import re
from importlib.metadata import entry_points

import pytest
from checkpoints import CHECKPOINTS
from dense_families import DENSE_FAMILIES
from encoder_checkpoints import ENCODERS
from transformers import CONFIG_MAPPING, PretrainedConfig

READERS = {
    name: reader
    for entry in entry_points(group="jpaged.models")
    for name, reader in getattr(entry.load(), "configs", {}).items()
    if name == entry.name
}
OF_TRANSFORMERS_ALONE = {field.name for field in dataclasses.fields(PretrainedConfig)} | {
    "_name_or_path",
    "_sliding_window_pattern",
    "output_attentions",
}
OF_TRAINING_OR_OTHER_KERNELS = """
    attention_dropout chunk_size classifier_dropout dropout embd_pdrop embedding_dropout hidden_dropout init_std
    initializer_range is_decoder layerdrop mamba_chunk_size num_logits_to_keep output_router_logits pretraining_tp
    rescale_prenorm_residual resid_pdrop residual_dropout router_aux_loss_coef router_jitter_noise time_step_floor
    time_step_max time_step_min time_step_rank use_associative_scan use_cache use_mamba_kernels use_mambapy
    z_loss_coefficient
"""
DERIVED = ("layer_types", "layers_num_experts", "num_experts", "num_local_experts")


def plain(value):
    """A value as JSON has it; transformers keeps the older name of a kind of rotation next to the newer one."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name != "type"}
    return list(value) if isinstance(value, tuple) else value


def differences(found, wanted: PretrainedConfig) -> dict[str, tuple]:
    """Return the fields that differ, with both values.

    The width and the number of heads of keys that transformers leaves open are computed.
    """
    names = wanted.to_dict().keys() - OF_TRANSFORMERS_ALONE - set(OF_TRAINING_OR_OTHER_KERNELS.split())
    names |= {name for name in DERIVED if hasattr(wanted, name)}
    pairs = {name: (plain(getattr(found, name, "absent")), plain(getattr(wanted, name))) for name in names}
    pairs.pop("partial_rotary_factor", None)  # moved to rope_parameters; Phi-3's stays in both places
    computed = {name for name in ("head_dim", "num_key_value_heads") if getattr(wanted, name, None) is None}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in computed}


def in_json(config: PretrainedConfig) -> dict:
    return json.loads(config.to_json_string(use_diff=False)) | {
        "time_step_limit": getattr(config, "time_step_limit", 0)
    }


@pytest.mark.parametrize("model_type", [name for name in READERS if name in CONFIG_MAPPING])
def test_what_a_file_leaves_out_is_as_in_transformers(model_type):
    assert not differences(READERS[model_type]({"model_type": model_type}), CONFIG_MAPPING[model_type]())


def test_an_encoders_window_is_read_as_by_transformers():
    wanted = ENCODERS["embedding_gemma"]
    found = READERS["gemma3_text"](in_json(wanted))
    assert found.sliding_window == wanted.sliding_window == 6 and not differences(found, wanted)


@pytest.mark.parametrize("name", [*CHECKPOINTS, *DENSE_FAMILIES])
def test_what_a_file_says_is_read_as_by_transformers_and_read_again_alike(name):
    wanted = (CHECKPOINTS | DENSE_FAMILIES)[name]
    if wanted.model_type not in READERS:
        pytest.skip(f"{wanted.model_type} leaves its config to transformers")
    reader = READERS[wanted.model_type]
    found = reader(in_json(wanted))
    assert not differences(found, wanted)
    assert reader(found.given) == found


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT = {"num_hidden_layers": 7}


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"model_type": "llama", "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"},
        {"model_type": "llama", "rope_scaling": None, "num_key_value_heads": None, "head_dim": None},
        {"model_type": "llama", "num_attention_heads": 16, "head_dim": 80},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "ministral", "sliding_window": None, **SHORT},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3, "rope_scaling": YARN, **SHORT},
        {"model_type": "qwen3", "layer_types": ["attention"] * 7, **SHORT},
        {"model_type": "phi3", "rope_theta": 2e4, "partial_rotary_factor": 0.75},
        {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 5000},
        {"model_type": "stablelm", "partial_rotary_factor": 0.5, "rope_theta": 100},
        {"model_type": "olmo3", "rope_theta": 7e5, "rope_scaling": {**YARN, "rope_type": "yarn"}, **SHORT},
        {"model_type": "gemma", "hidden_act": "gelu"},
        {"model_type": "gemma3_text", "rope_theta": 5e5, "rope_local_base_freq": 300, "sliding_window_pattern": 2},
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"model_type": "smollm3", "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9},
        {"model_type": "cohere2", "sliding_window_pattern": 3},
        {"model_type": "exaone4", "sliding_window_pattern": 2, **SHORT},
        {"model_type": "exaone4", "sliding_window_pattern": "LLLG", "layer_types": ["full_attention"] * 7, **SHORT},
        {
            "model_type": "exaone4",
            "sliding_window_pattern": None,
            "sliding_window": None,
            "layer_types": ["full_attention"],
        }
        | {"num_hidden_layers": 1},
        {"model_type": "gpt_oss", "num_experts": 9, **SHORT},
        {"model_type": "llama4_text", "no_rope_layers": [], "interleave_moe_layer_step": 2, **SHORT},
        {"model_type": "llama4_text", "attention_chunk_size": None, **SHORT},
        {"model_type": "jamba", "mamba_dt_rank": 5, "attn_layer_period": 3, "attn_layer_offset": 1},
        {"model_type": "bamba", "attn_layer_indices": [2, 5], **SHORT},
        {"model_type": "falcon_h1", "mamba_d_ssm": None, "mamba_n_heads": 4, "rope_theta": 1e11, **SHORT},
        {"model_type": "qwen3_next", "full_attention_interval": 3, **SHORT},
        {"model_type": "lfm2", "full_attn_idxs": [1, 4], "tie_embedding": False, "block_ff_dim": 99, **SHORT},
        {"model_type": "mixtral", "num_experts": 5},
        {"model_type": "qwen3_moe", "use_sliding_window": True},
        {"model_type": "qwen3_moe", "layer_types": None},
        {"model_type": "deepseek_v3", "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"model_type": "deepseek_v2", "q_lora_rank": None, "n_group": None},
        {"model_type": "opt", "hidden_size": 48, "word_embed_proj_dim": 24},
    ],
    ids=lambda fields: "-".join([fields["model_type"], *(name for name in fields if name != "model_type")]),
)
def test_older_names_and_nulls_are_read_as_by_transformers(fields):
    given = json.dumps(fields)
    found = READERS[fields["model_type"]](fields)
    assert json.dumps(fields) == given
    own = {name: value for name, value in json.loads(given).items() if name != "model_type"}
    assert not differences(found, CONFIG_MAPPING[fields["model_type"]](**own))


def test_a_scaling_that_is_added_to_a_file_keeps_the_files_base():
    """transformers falls back to the family's default there."""
    fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": dict(YARN)}
    made = READERS["qwen3"]({"model_type": "qwen3", **fields}).rope_parameters
    assert (made["rope_theta"], made["rope_type"], made["factor"]) == (1e6, "yarn", 4.0)


def test_a_pattern_in_letters_says_which_layers_are_local():
    """transformers reads it only next to the list of layers that published files have."""
    made = [READERS["exaone4"]({"sliding_window_pattern": pattern, **SHORT}).layer_types for pattern in ("LLLG", 4)]
    assert made[0] == made[1]
    assert set(READERS["exaone4"]({"sliding_window_pattern": None}).layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": "x"}, "num_hidden_layers='x' is str; it must be int"),
        ({"num_hidden_layers": None}, "num_hidden_layers is null; it must be int"),
        ({"num_hidden_layers": True}, "num_hidden_layers='True' is bool; it must be int"),
        ({"attention_bias": 1}, "attention_bias='1' is int; it must be bool"),
        ({"head_dim": "64"}, "head_dim='64' is str; it must be int"),
        ({"rope_scaling": [1]}, "rope_scaling='[1]' is list; it must be dict"),
        ({"hidden_size": 128, "num_attention_heads": 6}, "hidden_size=128 is not a multiple of num_attention_heads=6"),
        ({"rope_scaling": {"type": "linear"}}, "rope_parameters of rope_type='linear' lack factor"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(fields, reason):
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        READERS["llama"]({"model_type": "llama", **fields})


def test_what_contradicts_itself_is_named():
    with pytest.raises(ValueError, match="attn_layer_offset=8 is not below attn_layer_period=8"):
        READERS["jamba"]({"model_type": "jamba", "attn_layer_offset": 8})
    with pytest.raises(ValueError, match="hidden_size \\* expand = 8192 is not num_heads=3"):
        READERS["mamba2"]({"model_type": "mamba2", "num_heads": 3, "head_dim": None})
    with pytest.raises(ValueError, match="mamba_d_head=5"):
        READERS["bamba"]({"model_type": "bamba", "mamba_d_head": 5})
    with pytest.raises(ValueError, match="ssm_multipliers has 3 numbers, not 5"):
        READERS["falcon_h1"]({"model_type": "falcon_h1", "ssm_multipliers": [1, 2, 3]})


def test_a_field_that_is_set_later_is_given_too():
    config = READERS["llama"]({"model_type": "llama"})
    config.tie_word_embeddings = True
    assert config.given == {"model_type": "llama", "tie_word_embeddings": True}
    assert config.to_dict()["tie_word_embeddings"] and not hasattr(config, "of_another_family")

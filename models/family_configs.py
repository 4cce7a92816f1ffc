"""States the defaults of the configs of the families in `families`, one row a ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jpaged.model_api import ModelConfig

from .config_reader import ConfigReader, Fields, Rope, dense, every_nth


def _phi3(fields: Fields) -> None:
    """Take the older names of Phi-3's scaling."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    for name in ("type", "rope_type"):
        if rope.get(name) in ("su", "yarn"):
            rope[name] = "longrope"


def _olmo3(fields: Fields) -> None:
    every_nth(fields, "sliding_attention", 4)


def _gemma(fields: Fields) -> None:
    """Take GELU for its approximation by tanh, which Gemma was trained with; its first files name the other."""
    if fields["hidden_act"] == "gelu":
        fields["hidden_act"] = "gelu_pytorch_tanh"


def _smollm3(fields: Fields) -> None:
    """Set which layers rotate; where there is a window, those that do not are local."""
    layers, period = range(fields["num_hidden_layers"]), fields["no_rope_layer_interval"]
    if fields["no_rope_layers"] is None:
        fields["no_rope_layers"] = [int((number + 1) % period != 0) for number in layers]
    if fields["layer_types"] is None:
        slides = fields["use_sliding_window"] and fields["sliding_window"] is not None
        rotates = fields["no_rope_layers"]
        fields["layer_types"] = [
            "sliding_attention" if slides and not rotates[number] else "full_attention" for number in layers
        ]


def _glm4(fields: Fields) -> None:
    if fields["eos_token_id"] is None:
        fields["eos_token_id"] = [151329, 151336, 151338]


def _cwm(fields: Fields) -> None:
    """Set which layers are local: all but each fourth, from the first on."""
    if fields["layer_types"] is None:
        layers = range(fields["num_hidden_layers"])
        fields["layer_types"] = ["sliding_attention" if number % 4 else "full_attention" for number in layers]
    if fields["eos_token_id"] is None:
        fields["eos_token_id"] = [128001, 128008, 128009]


def _cohere2(fields: Fields) -> None:
    fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    every_nth(fields, "sliding_attention", fields.get("sliding_window_pattern") or 4)


def _exaone4(fields: Fields) -> None:
    """Set which layers are local: none without a window or a pattern, else by one such as ``LLLG``, or all but every
    n-th."""
    pattern = fields["sliding_window_pattern"] or "G"
    if fields["sliding_window"] is None:
        fields["sliding_window_pattern"], pattern = 0, "G"
    if not isinstance(pattern, str):
        return every_nth(fields, "sliding_attention", pattern)
    if fields["layer_types"] is None:
        layers = range(fields["num_hidden_layers"])
        local = [pattern[number % len(pattern)] == "L" for number in layers]
        fields["layer_types"] = ["sliding_attention" if each else "full_attention" for each in local]
    return None


_COHERE: Fields = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-05,
    "pad_token_id": 0,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
"""Defaults that Command R and Command R7B share."""
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_CWM_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

_GLM = ConfigReader(
    dense(
        vocab_size=151552,
        intermediate_size=13696,
        num_hidden_layers=40,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-07,
        pad_token_id=151329,
        eos_token_id=None,
        bos_token_id=None,
        attention_bias=True,
    ),
    rope=Rope(rotated=0.5),
    follow=_glm4,
)
"""Reads the config of GLM-4 in both of its forms, whose defaults are the same."""

CONFIGS: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "phi3": ConfigReader(
        dense(
            vocab_size=32064,
            hidden_size=3072,
            intermediate_size=8192,
            max_position_embeddings=4096,
            original_max_position_embeddings=4096,
            rms_norm_eps=1e-05,
            eos_token_id=32000,
            pad_token_id=32000,
            sliding_window=None,
        ),
        rope=Rope(rotated=1.0),
        follow=_phi3,
    ),
    "granite": ConfigReader(
        dense(
            vocab_size=32000,
            intermediate_size=11008,
            max_position_embeddings=2048,
            rms_norm_eps=1e-06,
            attention_bias=False,
            mlp_bias=False,
            embedding_multiplier=1.0,
            logits_scaling=1.0,
            residual_multiplier=1.0,
            attention_multiplier=1.0,
        )
    ),
    "olmo2": ConfigReader(
        dense(
            vocab_size=50304,
            intermediate_size=11008,
            max_position_embeddings=2048,
            pad_token_id=1,
            bos_token_id=None,
            eos_token_id=50279,
            attention_bias=False,
            rms_norm_eps=1e-05,
        )
    ),
    "olmo3": ConfigReader(
        dense(
            vocab_size=50304,
            intermediate_size=11008,
            max_position_embeddings=2048,
            pad_token_id=1,
            bos_token_id=None,
            eos_token_id=50279,
            attention_bias=False,
            rms_norm_eps=1e-05,
            sliding_window=4096,
            layer_types=None,
        ),
        rope=Rope(500000.0, by_type=True, local_theta=500000.0),
        follow=_olmo3,
    ),
    "gemma": ConfigReader(
        dense(
            vocab_size=256000,
            hidden_size=3072,
            intermediate_size=24576,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=16,
            head_dim=256,
            hidden_act="gelu_pytorch_tanh",
            max_position_embeddings=8192,
            rms_norm_eps=1e-06,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            tie_word_embeddings=True,
            attention_bias=False,
            use_bidirectional_attention=None,
        ),
        follow=_gemma,
    ),
    "smollm3": ConfigReader(
        dense(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            rms_norm_eps=1e-06,
            pad_token_id=128004,
            bos_token_id=128000,
            eos_token_id=128001,
            use_sliding_window=False,
            sliding_window=None,
            no_rope_layers=None,
            no_rope_layer_interval=4,
            layer_types=None,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=True,
        ),
        rope=Rope(2000000.0),
        follow=_smollm3,
    ),
    "glm4": _GLM,
    "glm": _GLM,
    "arcee": ConfigReader(
        dense(
            vocab_size=32000,
            hidden_size=2560,
            intermediate_size=18432,
            hidden_act="relu2",
            max_position_embeddings=4096,
            rms_norm_eps=1e-05,
            bos_token_id=128000,
            eos_token_id=128001,
            attention_bias=False,
            mlp_bias=False,
            head_dim=None,
        )
    ),
    "nemotron": ConfigReader(
        dense(
            vocab_size=256000,
            hidden_size=6144,
            intermediate_size=24576,
            num_attention_heads=48,
            head_dim=None,
            hidden_act="relu2",
            max_position_embeddings=4096,
            norm_eps=1e-05,
            bos_token_id=2,
            eos_token_id=3,
            attention_bias=False,
            mlp_bias=False,
        ),
        rope=Rope(rotated=0.5),
    ),
    "cwm": ConfigReader(
        dense(
            vocab_size=128256,
            hidden_size=6144,
            intermediate_size=21504,
            num_hidden_layers=64,
            num_attention_heads=48,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-05,
            bos_token_id=128000,
            eos_token_id=None,
            mlp_bias=False,
            head_dim=128,
            sliding_window=8192,
            layer_types=None,
        ),
        rope=Rope(1000000.0, scaling=_CWM_ROPE),
        follow=_cwm,
    ),
    "seed_oss": ConfigReader(
        dense(
            vocab_size=155136,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=80,
            num_key_value_heads=8,
            max_position_embeddings=524288,
            rms_norm_eps=1e-06,
            pad_token_id=1,
            bos_token_id=0,
            attention_bias=True,
            attention_out_bias=False,
            mlp_bias=False,
            head_dim=128,
        )
    ),
    "ernie4_5": ConfigReader(
        dense(
            vocab_size=103424,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=18,
            num_attention_heads=16,
            num_key_value_heads=2,
            max_position_embeddings=131072,
            rms_norm_eps=1e-05,
            pad_token_id=0,
            tie_word_embeddings=True,
            use_bias=False,
            head_dim=128,
        ),
        rope=Rope(500000.0),
    ),
    "starcoder2": ConfigReader(
        dense(
            vocab_size=49152,
            hidden_size=3072,
            intermediate_size=12288,
            num_hidden_layers=30,
            num_attention_heads=24,
            num_key_value_heads=2,
            hidden_act="gelu_pytorch_tanh",
            max_position_embeddings=4096,
            norm_epsilon=1e-05,
            bos_token_id=50256,
            eos_token_id=50256,
            sliding_window=None,
            use_bias=True,
            tie_word_embeddings=True,
        )
    ),
    "gpt_neox": ConfigReader(
        dense(
            vocab_size=50432,
            hidden_size=6144,
            num_hidden_layers=44,
            num_attention_heads=64,
            intermediate_size=24576,
            hidden_act="gelu",
            max_position_embeddings=2048,
            layer_norm_eps=1e-05,
            bos_token_id=0,
            use_parallel_residual=True,
            attention_bias=True,
        ),
        rope=Rope(rotated=0.25, theta_name="rotary_emb_base", rotated_name="rotary_pct"),
    ),
    "stablelm": ConfigReader(
        dense(
            vocab_size=50304,
            intermediate_size=6912,
            hidden_size=2560,
            num_key_value_heads=32,
            max_position_embeddings=4096,
            layer_norm_eps=1e-05,
            use_qkv_bias=False,
            qk_layernorm=False,
            use_parallel_residual=False,
            bos_token_id=0,
            eos_token_id=0,
        ),
        rope=Rope(rotated=0.25),
    ),
    "phi": ConfigReader(
        dense(
            vocab_size=51200,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=24,
            hidden_act="gelu_new",
            max_position_embeddings=2048,
            layer_norm_eps=1e-05,
            qk_layernorm=False,
        ),
        rope=Rope(rotated=0.5),
    ),
    "apertus": ConfigReader(
        dense(
            vocab_size=131072,
            intermediate_size=14336,
            hidden_act="xielu",
            max_position_embeddings=65536,
            rms_norm_eps=1e-05,
            pad_token_id=3,
            attention_bias=False,
        ),
        rope=Rope(12000000.0, scaling=_APERTUS_ROPE),
    ),
    "cohere": ConfigReader(
        dense(
            **_COHERE,
            use_qk_norm=False,
        ),
        rope=Rope(500000.0),
    ),
    "cohere2": ConfigReader(
        dense(
            **_COHERE,
            sliding_window=4096,
            layer_types=None,
        ),
        follow=_cohere2,
    ),
    "hunyuan_v1_dense": ConfigReader(
        dense(
            vocab_size=290943,
            intermediate_size=11008,
            max_position_embeddings=2048,
            rms_norm_eps=1e-05,
            pad_token_id=0,
            eod_token_id=3,
            attention_bias=False,
            head_dim=None,
        )
    ),
    "exaone4": ConfigReader(
        dense(
            vocab_size=102400,
            intermediate_size=16384,
            num_key_value_heads=32,
            max_position_embeddings=2048,
            rms_norm_eps=1e-05,
            bos_token_id=0,
            sliding_window=4096,
            sliding_window_pattern=4,
            layer_types=None,
        ),
        follow=_exaone4,
    ),
    "ministral3": ConfigReader(
        dense(
            vocab_size=131072,
            intermediate_size=14336,
            num_hidden_layers=34,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=262144,
            rms_norm_eps=1e-05,
            pad_token_id=11,
            sliding_window=None,
        ),
        rope=Rope(scaling=_MINISTRAL3_ROPE),
    ),
}
"""Reads the config of each family."""

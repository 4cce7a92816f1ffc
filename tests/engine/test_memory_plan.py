"""A sequence may be as long as the model was trained for, or as its config's rotary scaling stretches that."""

import pytest
from transformers import DeepseekV2Config, Gemma3Config, Gemma3TextConfig, LlamaConfig, MambaConfig, Qwen2Config

from jpaged.engine.memory_plan import DEFAULT_MAX_MODEL_LEN, resolve_max_model_len

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (LlamaConfig(max_position_embeddings=4096), 4096),
        (LlamaConfig(max_position_embeddings=4096, rope_parameters=LINEAR), 10240),
        (LlamaConfig(max_position_embeddings=4096, rope_parameters=LINEAR | {"rope_type": "dynamic"}), 4096),
        (LlamaConfig(max_position_embeddings=131072, rope_parameters=LLAMA3), 131072),
        # What Qwen's pages tell readers to add to the configs of Qwen2.5 and Qwen3.
        (Qwen2Config(max_position_embeddings=32768, rope_parameters=dict(YARN)), 131072),
        (Qwen2Config(max_position_embeddings=40960, rope_parameters=dict(YARN)), 131072),
        (Qwen2Config(max_position_embeddings=131072, rope_parameters=dict(YARN)), 131072),
        (Qwen2Config(max_position_embeddings=40960, rope_parameters=YARN | {"factor": 1.0}), 40960),
        (DeepseekV2Config(max_position_embeddings=163840, rope_parameters=YARN | {"factor": 2.0}), 163840),
        (Gemma3TextConfig(max_position_embeddings=131072), 131072),
        (Gemma3Config(text_config={"max_position_embeddings": 32768}), 32768),
    ],
)
def test_the_longest_sequence_is_what_rotary_scaling_stretches_the_training_to(config, longest):
    assert resolve_max_model_len(longest, config) == longest
    with pytest.raises(ValueError, match=rf"max_model_len={longest + 1} is above the model's max_position_embeddings="):
        resolve_max_model_len(longest + 1, config)


def test_an_error_tells_what_scaling_makes_of_the_limit():
    config = Qwen2Config(max_position_embeddings=32768, rope_parameters=dict(YARN))
    with pytest.raises(ValueError, match=r"max_position_embeddings=32768, stretched to 131072 by its rope_parameters$"):
        resolve_max_model_len(200000, config)


def test_scaling_does_not_change_what_is_taken_where_nobody_asks():
    assert resolve_max_model_len(None, Qwen2Config(rope_parameters=dict(YARN))) == DEFAULT_MAX_MODEL_LEN
    short = LlamaConfig(max_position_embeddings=512, rope_parameters=LINEAR)
    assert resolve_max_model_len(None, short) == 512


def test_a_model_that_knows_no_positions_has_no_limit():
    assert resolve_max_model_len(1 << 20, MambaConfig()) == 1 << 20

"""Rotary tables against transformers' own frequencies."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen2VLTextConfig, Qwen3_5TextConfig, Qwen3VLTextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from jpaged_models.rope import rotary_from_config, rotate, rotate_by_product

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
PARAMETERS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0},
    YARN,
    YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2},
    YARN | {"attention_factor": 1.25},
    YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
]


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_rotation_equals_transformers(parameters, head_dim):
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )
    positions = np.array([0, 1, 17, 63, 64, 300, 511])
    x = np.random.default_rng(0).standard_normal((7, 2, head_dim)).astype(np.float32)

    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor(positions)[None])
    heads_first = torch.tensor(x).transpose(0, 1)[None]
    want = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)[0][0].transpose(0, 1).numpy()

    with np.errstate(all="raise"):
        rotary = rotary_from_config(config, head_dim)
    got = rotate(jnp.asarray(x), rotary.tables(jnp.asarray(positions)))
    np.testing.assert_allclose(got, want, atol=2e-4, rtol=0)


def test_rotation_is_computed_in_float32_and_returned_in_the_dtype_given():
    rotary = rotary_from_config(LlamaConfig(), 128)
    tables = rotary.tables(jnp.array([5, 1000]))
    assert tables[0].dtype == jnp.float32
    assert rotate(jnp.ones((2, 3, 4, 128), jnp.bfloat16), tables).dtype == jnp.bfloat16


def test_equal_rotaries_hash_alike():
    """They are static parts of modules, so a second model must not recompile the step."""
    assert hash(rotary_from_config(LlamaConfig(), 128)) == hash(rotary_from_config(LlamaConfig(), 128))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("turning", [64, 40], ids=["whole heads", "part of each head"])
def test_a_product_rotates_what_turns_and_leaves_the_last_rows_as_they_are(turning, dtype):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(9, 2, 5, 64)), dtype)
    angles = random.normal(size=(9, turning // 2)).astype(np.float32)
    tables = jnp.cos(angles), jnp.sin(angles)
    got = np.asarray(rotate_by_product(x, tables, still=1), np.float32)
    want = np.asarray(rotate(x, tables), np.float32)
    np.testing.assert_allclose(got[:, :, :-1], want[:, :, :-1], rtol=0, atol=1e-6 if dtype == "float32" else 0.02)
    np.testing.assert_array_equal(got[:, :, -1], np.asarray(x, np.float32)[:, :, -1])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_each_pair_is_turned_by_the_axis_that_transformers_takes(name):
    sections = {"qwen2_vl": [16, 24, 24], "qwen3_vl": [24, 20, 20], "qwen3_5": [11, 11, 10]}[name]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    rope |= {"partial_rotary_factor": 0.25} if name == "qwen3_5" else {}
    head_dim = 256 if name == "qwen3_5" else 128
    sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": rope}
    more = {} if name == "qwen2_vl" else {"head_dim": head_dim}
    kinds = {
        "qwen2_vl": (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding),
        "qwen3_vl": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding),
        "qwen3_5": (Qwen3_5TextConfig, Qwen3_5TextRotaryEmbedding),
    }
    config_class, embedding = kinds[name]
    config = config_class(**sizes, **more)
    places = np.random.default_rng(0).integers(0, 300, (9, 3))
    cos, sin = embedding(config)(torch.zeros(1), torch.tensor(places.T)[:, None])
    rotary = rotary_from_config(config, head_dim, partial=True)
    for mine, theirs in zip(rotary.tables(jnp.asarray(places)), (cos, sin), strict=True):
        half = mine.shape[1]
        np.testing.assert_allclose(mine, theirs[0, :, :half].numpy(), atol=1e-4)
    text = rotary.tables(jnp.arange(5))
    np.testing.assert_array_equal(text[0], rotary.tables(jnp.repeat(jnp.arange(5)[:, None], 3, axis=1))[0])


def test_places_on_axes_need_a_config_that_says_which_pair_turns_by_which():
    with pytest.raises(ValueError, match="no mrope_section"):
        rotary_from_config(LlamaConfig(), 128).tables(jnp.zeros((4, 3), jnp.int32))

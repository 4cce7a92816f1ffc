"""Rotary tables against transformers' own frequencies."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

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
    {"rope_type": "llama3", **LLAMA3},
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

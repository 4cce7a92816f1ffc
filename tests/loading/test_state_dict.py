"""New weights by the names of a Hugging Face checkpoint, from any array library, into any layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from tiny_folders import write_llama
from transformers import AutoModelForCausalLM

from jpaged.loading import load_model
from jpaged.loading.state_dict import cast_like, is_state_dict, params_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tensors(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def made(loaded, tensors, *, quantization=None, cast=False):
    return params_of(
        tensors, loaded.model, loaded.params, loaded.mesh, dtype=loaded.dtype, quantization=quantization, cast=cast
    )


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("library", ["torch", "numpy", "jax"])
def test_a_state_dict_gives_what_loading_the_checkpoint_gives(folder, tensors, stacked, library):
    loaded = load_model(folder, stacked=stacked)
    if library != "torch":
        tensors = {name: tensor.numpy() for name, tensor in tensors.items()}
    if library == "jax":
        tensors = {name: jnp.asarray(tensor) for name, tensor in tensors.items()}
    assert_same(made(loaded, tensors), loaded.params)


def test_another_dtype_is_refused_unless_it_is_to_be_cast(folder, tensors):
    loaded = load_model(folder)
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match=r"in the state dict is bfloat16, the engine is float32: give cast=True"):
        made(loaded, halves)
    rounded = {name: tensor.float() for name, tensor in halves.items()}
    assert_same(made(loaded, halves, cast=True), made(loaded, rounded))


def test_matrices_are_quantised_anew_where_the_engine_holds_them_so(folder, tensors):
    loaded = load_model(folder, quantization="int8")
    with pytest.raises(ValueError, match="quantization='int8': give cast=True"):
        made(loaded, tensors, quantization="int8")
    assert_same(made(loaded, tensors, quantization="int8", cast=True), loaded.params)
    with pytest.raises(ValueError, match="quantised in the file they came from"):
        made(loaded, tensors, cast=True)


def test_the_text_part_of_a_multimodal_state_dict_is_taken(folder, tensors):
    loaded = load_model(folder)
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.patches"] = torch.zeros(3)
    assert_same(made(loaded, renamed), loaded.params)


def test_a_missing_tensor_and_a_wrong_shape_are_named(folder, tensors):
    loaded = load_model(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"the state dict has no tensor {name}"):
        made(loaded, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ValueError, match=name):
        made(loaded, tensors | {name: tensors[name][:4]})


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_head_beside_the_embedding_that_is_the_models_head_must_repeat_it(tmp_path, prefix):
    tied = make_checkpoint("qwen3", tmp_path).state_dict()
    loaded, head = load_model(tmp_path), f"{prefix}lm_head.weight"
    assert loaded.config.tie_word_embeddings and "lm_head.weight" in tied
    tied = {prefix + name: tensor for name, tensor in tied.items()}
    assert_same(made(loaded, tied), loaded.params)
    assert_same(made(loaded, tied | {head: tied[head].clone()}), loaded.params)
    message = "lm_head.weight in the state dict differs from model.embed_tokens.weight, which is the head of this model"
    with pytest.raises(ValueError, match=message):
        made(loaded, tied | {head: tied[head] + 1})


def test_the_engines_own_tree_is_no_state_dict(folder, tensors):
    loaded = load_model(folder)
    assert is_state_dict(tensors) and not is_state_dict(loaded.params) and not is_state_dict({"a": {"b": 1}})


def test_a_tree_is_cast_leaf_by_leaf():
    old = {"weight": jnp.zeros(3, jnp.bfloat16), "codes": jnp.zeros(3, jnp.int8)}
    new = cast_like({"weight": jnp.ones(3, jnp.float32), "codes": jnp.ones(3, jnp.int32)}, old)
    assert new["weight"].dtype == jnp.bfloat16
    assert new["codes"].dtype == jnp.int32, "codes are no weights to round"
    assert cast_like([jnp.ones(3)], old)[0].dtype == jnp.float32

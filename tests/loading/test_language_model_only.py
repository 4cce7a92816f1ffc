"""Multimodal checkpoints are loaded as their text model, under either naming of tensors."""

import json

import numpy as np
import pytest
import torch
from dense_model import run_dense
from flax import nnx
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)
from wrapped_families import BY_THEIR_TEXT, SIGHT, TOKENS, mistral3, saved, text_of

from jpaged.loading import load_model
from jpaged.loading.registry import model_types
from jpaged.loading.source import Source
from jpaged.loading.tokenizer import eos_token_ids
from jpaged.model_api import ImageGroup

MULTIMODAL = {
    "gemma3": (
        Gemma3ForConditionalGeneration,
        Gemma3Config(text_config=text_of("gemma3"), vision_config=SIGHT, image_token_id=205, mm_tokens_per_image=4),
    ),
    "llama4": (
        Llama4ForConditionalGeneration,
        Llama4Config(
            text_config=text_of("llama4"),
            vision_config={**SIGHT, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
            image_token_index=205,
        ),
    ),
    "mistral3": mistral3("mistral-window"),
}


@pytest.fixture(scope="module", params=MULTIMODAL)
def multimodal(request, tmp_path_factory):
    """(folder, transformers' logits of a text)."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, saved(*MULTIMODAL[request.param], folder)


def logits_of(folder, **options):
    loaded = load_model(folder, dtype="float32", **{"language_model_only": True} | options)
    return run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)


def test_text_is_computed_as_the_whole_model_computes_it(multimodal, recwarn):
    folder, expected = multimodal
    np.testing.assert_allclose(logits_of(folder), expected, atol=1e-4, rtol=0)
    unused = [each for each in recwarn if "were not used" in str(each.message)]
    assert not unused, "tensors of other parts are none that were forgotten"


@pytest.mark.parametrize("name", BY_THEIR_TEXT)
def test_the_text_of_a_family_that_sees_is_loaded_alone(name, tmp_path, recwarn):
    expected = saved(*BY_THEIR_TEXT[name], tmp_path)
    np.testing.assert_allclose(logits_of(tmp_path), expected, atol=1e-4, rtol=0)
    assert not [each for each in recwarn if str(each.message).startswith(str(tmp_path))]


def test_without_a_family_for_its_pictures_the_text_is_loaded_with_a_warning(tmp_path):
    eyes = {**SIGHT, "model_type": "clip_vision_model"}
    config = VipLlavaConfig(text_config=text_of("llama"), vision_config=eyes, tie_word_embeddings=False)
    assert config.model_type not in model_types(), "take another that has none"
    expected = saved(VipLlavaForConditionalGeneration, config, tmp_path)
    with pytest.warns(UserWarning) as warned:
        np.testing.assert_allclose(logits_of(tmp_path, language_model_only=False), expected, atol=1e-4, rtol=0)
    (text,) = [str(each.message) for each in warned if str(each.message).startswith(str(tmp_path))]
    assert "only its language model" in text


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_text_model_described_next_to_the_pictures_is_loaded(name, tmp_path):
    """Qwen's own files: no text_config, and the text model's tensors have the names that it has alone."""
    expected = saved(*BY_THEIR_TEXT[name], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text.pop("model_type")
    rope = text.pop("rope_parameters")
    own = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    (tmp_path / "config.json").write_text(json.dumps(text | config | own))
    tensors = load_file(tmp_path / "model.safetensors")
    published = {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): each
        for key, each in tensors.items()
    }
    assert {"model.embed_tokens.weight", "visual.patch_embed.proj.weight"} < published.keys()
    save_file(published, tmp_path / "model.safetensors", {"format": "pt"})
    np.testing.assert_allclose(logits_of(tmp_path), expected, atol=1e-4, rtol=0)
    whole = load_model(tmp_path, dtype="float32").model
    assert any(isinstance(group, ImageGroup) for group in whole.layer_groups), "it does not see"


def test_the_other_naming_is_read_too(multimodal, tmp_path):
    folder, expected = multimodal
    tensors = load_file(folder / "model.safetensors")
    old = any(name.startswith("language_model.") for name in tensors)
    names = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    if not old:
        names = {new: was for was, new in names.items()}
    for prefix, other in names.items():
        tensors = {other + n.removeprefix(prefix) if n.startswith(prefix) else n: t for n, t in tensors.items()}
    assert old != any(name.startswith("language_model.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    np.testing.assert_allclose(logits_of(tmp_path), expected, atol=1e-4, rtol=0)


def test_a_text_models_config_over_a_multimodal_models_tensors_is_read(multimodal, tmp_path):
    folder, expected = multimodal
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config["text_config"]))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    np.testing.assert_allclose(logits_of(tmp_path), expected, atol=1e-4, rtol=0)


def test_a_base_models_names_are_read_too(multimodal, tmp_path):
    folder, expected = multimodal
    tensors = load_file(folder / "model.safetensors")
    for prefix in ("language_model.model.", "model.language_model."):
        tensors = {n.replace(prefix, "language_model."): t for n, t in tensors.items()}
    tensors = {n.replace("language_model.lm_head.", "lm_head."): t for n, t in tensors.items()}
    assert any(name.startswith("language_model.layers.0.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    np.testing.assert_allclose(logits_of(tmp_path), expected, atol=1e-4, rtol=0)


def test_end_of_sequence_is_the_text_models(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [1, 106]}}))
    assert eos_token_ids(Source("it", "safetensors", tmp_path)) == (1, 106)


def test_a_checkpoint_without_a_text_model_is_named(multimodal, tmp_path):
    save_file({"vision_tower.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((multimodal[0] / "config.json").read_text())
    with pytest.raises(ValueError, match="no tensor begins with language_model"):
        load_model(tmp_path, language_model_only=True)

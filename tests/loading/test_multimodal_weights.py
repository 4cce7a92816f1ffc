"""A model with eyes is loaded whole: under every naming of its tensors, saved and read again, and from a state dict."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from vision_checkpoints import make_gemma3, make_llava

from jpaged.loading import convert_checkpoint, load_model
from jpaged.loading.state_dict import params_of

MAKERS = {"gemma3": make_gemma3, "llava_onevision": make_llava}
PUBLISHED = {"vision_tower.": "vision_tower.vision_model."}
NEWER = {
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "image_newline": "model.image_newline",
}


@pytest.fixture(scope="module", params=MAKERS)
def checkpoint(request, tmp_path_factory):
    """(folder, transformers' model, what is loaded of it)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = MAKERS[request.param](folder)
    return folder, model, load_model(folder, dtype="float32")


def assert_equal(params, others):
    """Both trees hold the same numbers, and not only zeros."""
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True))
    assert len(pairs) > 20
    for one, other in pairs:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("names", [PUBLISHED, NEWER], ids=["published", "newer"])
def test_tensors_are_found_under_other_names(checkpoint, names, tmp_path):
    folder, _, loaded = checkpoint
    tensors = load_file(folder / "model.safetensors")
    for old, new in names.items():
        tensors = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors.items()}
    assert set(tensors) != set(load_file(folder / "model.safetensors"))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert_equal(load_model(tmp_path, dtype="float32").params, loaded.params)


def test_a_saved_checkpoint_has_the_encoder_and_says_how_images_are_prepared(checkpoint, tmp_path):
    folder, _, loaded = checkpoint
    convert_checkpoint(folder, tmp_path / "saved")
    assert_equal(load_model(tmp_path / "saved", dtype="float32").params, loaded.params)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "saved" / name).exists() == (folder / name).exists()


def test_a_state_dict_of_transformers_model_is_taken_whole(checkpoint):
    _, model, loaded = checkpoint
    options = {"dtype": loaded.dtype, "quantization": None, "cast": False}
    tensors = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    doubled = params_of(tensors, loaded.model, loaded.params, loaded.mesh, **options)
    assert_equal(doubled, jax.tree.map(lambda x: 2 * x, loaded.params))


def test_the_language_model_alone_has_no_encoder(checkpoint):
    folder, _, loaded = checkpoint
    alone = load_model(folder, dtype="float32", language_model_only=True)
    assert len(jax.tree.leaves(alone.params)) < len(jax.tree.leaves(loaded.params))
    assert type(alone.model).__name__ in ("Gemma", "Llama")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """(folder, tensors, the embedding's name, what is loaded) of a model whose embedding is its head, too."""
    folder = tmp_path_factory.mktemp("tied")
    make_gemma3(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if "lm_head" not in n}
    save_file(tensors, folder / "model.safetensors")
    (embedding,) = [name for name in tensors if name.endswith("language_model.model.embed_tokens.weight")]
    return folder, tensors, embedding, load_model(folder, dtype="float32")


def written(tied, tensors, folder):
    """Return the parameters that are loaded of other tensors with the same config."""
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((tied[0] / "config.json").read_text())
    return load_model(folder, dtype="float32")


def test_a_head_that_repeats_a_tied_embedding_takes_no_memory(tied, tmp_path):
    _, tensors, embedding, loaded = tied
    found = written(tied, tensors | {"language_model.lm_head.weight": tensors[embedding].clone()}, tmp_path)
    assert_equal(found.params, loaded.params)


def test_a_head_that_differs_from_a_tied_embedding_is_read(tied, tmp_path):
    _, tensors, embedding, loaded = tied
    found = written(tied, tensors | {"language_model.lm_head.weight": tensors[embedding] * 2}, tmp_path)
    assert len(jax.tree.leaves(found.params)) == len(jax.tree.leaves(loaded.params)) + 1


def test_a_head_that_is_stored_without_its_tied_embedding_is_both(tied, tmp_path):
    _, tensors, embedding, loaded = tied
    alone = {name: tensor for name, tensor in tensors.items() if name != embedding}
    found = written(tied, alone | {"language_model.lm_head.weight": tensors[embedding]}, tmp_path)
    assert_equal(found.params, loaded.params)

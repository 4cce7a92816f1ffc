"""Which tables of the vocabulary a model has follows from what is stored, as in transformers, not from its config."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from dense_model import run_dense
from flax import nnx
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from jpaged.loading import load_model

TOKENS = np.random.default_rng(0).integers(3, 200, 12)
EMBEDDINGS = {
    "llama": "model.embed_tokens.weight",
    "opt": "model.decoder.embed_tokens.weight",
    "mamba2": "backbone.embeddings.weight",
}


@pytest.fixture(scope="module", params=EMBEDDINGS)
def stored(request, tmp_path_factory):
    """(folder, its tensors, the embedding's name)."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder)
    return folder, load_file(folder / "model.safetensors"), EMBEDDINGS[request.param]


def write(folder, source, tensors):
    """Write tensors beside a config that calls the tables tied."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def assert_like_transformers(folder, caplog):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)[None]).logits[0].numpy()
    with caplog.at_level(logging.WARNING, "jpaged"):
        loaded = load_model(folder, dtype="float32")
    assert not [record for record in caplog.records if record.name.startswith("jpaged")]
    found = run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)
    return loaded


def head_of(tensors, embedding):
    torch.manual_seed(1)
    return torch.randn_like(tensors[embedding]) * tensors[embedding].std()


def test_a_head_that_differs_from_the_embedding_is_read_though_the_config_calls_them_tied(stored, tmp_path, caplog):
    source, tensors, embedding = stored
    write(tmp_path, source, tensors | {"lm_head.weight": head_of(tensors, embedding)})
    loaded = assert_like_transformers(tmp_path, caplog)
    assert not loaded.config.tie_word_embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_head_that_repeats_the_embedding_takes_no_memory(stored, tmp_path, dtype, caplog):
    source, tensors, embedding = stored
    write(tmp_path, source, tensors | {"lm_head.weight": tensors[embedding].clone().to(dtype)})
    assert assert_like_transformers(tmp_path, caplog).config.tie_word_embeddings


def test_a_head_that_is_stored_alone_is_the_embedding_too(stored, tmp_path, caplog):
    source, tensors, embedding = stored
    alone = {name: tensor for name, tensor in tensors.items() if name not in (embedding, "lm_head.weight")}
    write(tmp_path, source, alone | {"lm_head.weight": head_of(tensors, embedding)})
    loaded = assert_like_transformers(tmp_path, caplog)
    assert loaded.config.tie_word_embeddings and embedding in loaded.tensor_shapes


def test_only_the_last_rows_may_tell_two_tables_apart(stored, tmp_path):
    source, tensors, embedding = stored
    head = tensors[embedding].clone()
    head[-1, -1] += 1
    write(tmp_path, source, tensors | {"lm_head.weight": head})
    assert not load_model(tmp_path).config.tie_word_embeddings


def test_a_base_models_checkpoint_is_recognised_by_its_embedding(stored, tmp_path):
    source, tensors, embedding = stored
    prefix = embedding.partition(".")[0] + "."
    base = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(base, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    whole, found = load_model(source), load_model(tmp_path)
    assert not found.pooling.generates and whole.pooling.generates
    np.testing.assert_array_equal(
        np.asarray(found.params["embed_tokens"]["weight"].get_value()),
        np.asarray(whole.params["embed_tokens"]["weight"].get_value()),
    )

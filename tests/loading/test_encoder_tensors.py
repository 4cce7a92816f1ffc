"""Encoders are read under one set of names, and their heads give transformers' logits."""

import numpy as np
import pytest
import torch
from encoder_checkpoints import make_encoder
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.pooling_head import read_pooling_head

IDS = [2, 9, 77, 140, 3]
PREFIXES = {"bert": "bert", "roberta": "roberta", "distilbert": "distilbert", "modernbert": "model", "gte": "gte"}


def head_of(folder):
    opened = open_model(str(folder))
    return opened, read_pooling_head(opened.source, opened.reader, opened.config)


@pytest.mark.parametrize("name", PREFIXES)
def test_a_head_for_classes_gives_transformers_logits(name, tmp_path):
    judge = make_encoder(name, tmp_path, AutoModelForSequenceClassification, num_labels=5)
    opened, head = head_of(tmp_path)
    assert not any(tensor.startswith((PREFIXES[name], "classifier", "head")) for tensor in opened.reader.names())
    ids = torch.tensor([IDS])
    with torch.no_grad():
        states = getattr(judge, PREFIXES[name])(input_ids=ids).last_hidden_state[0].numpy()
        logits = judge(input_ids=ids).logits[0].numpy()
    assert head.classes is not None and len(head.classes) == 5 and not head.independent
    assert head.class_pooling == ("mean" if name == "modernbert" else "cls")
    pooled = states.mean(0) if head.class_pooling == "mean" else states[0]
    np.testing.assert_allclose(head.classes(pooled), logits, atol=2e-5)


def test_a_head_for_tokens_is_refused(tmp_path):
    make_encoder("bert", tmp_path, AutoModelForTokenClassification, num_labels=5)
    with pytest.raises(ValueError, match="it classifies tokens, not prompts"):
        head_of(tmp_path)


def test_gamma_and_beta_of_old_checkpoints_are_scales_and_biases(tmp_path):
    make_encoder("bert", tmp_path)
    before = open_model(str(tmp_path)).reader
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in tensors.items()
    }
    save_file(old, tmp_path / "model.safetensors")
    after = open_model(str(tmp_path)).reader
    assert set(after.names()) == set(before.names())
    name = "encoder.layer.1.output.LayerNorm.weight"
    np.testing.assert_array_equal(after.read(name), tensors[name])


def test_the_fused_names_that_nomic_publishes_are_those_of_transformers(tmp_path):
    make_encoder("nomic_bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    published = any("Wqkv" in name for name in tensors)
    reader = open_model(str(tmp_path)).reader
    queries = reader.read("layers.2.self_attn.q_proj.weight")
    keys = reader.read("layers.2.self_attn.k_proj.weight")
    assert queries.shape == keys.shape == reader.shape("layers.2.self_attn.v_proj.weight") == (48, 48)
    if published:
        fused = next(array for name, array in tensors.items() if name.endswith("layers.2.attn.Wqkv.weight"))
        np.testing.assert_array_equal(np.concatenate([queries, keys]), fused[:96])

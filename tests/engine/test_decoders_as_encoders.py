"""Decoders that attend in both directions (EmbeddingGemma): vectors, classes and refusals, equal to those of torch."""

import json

import numpy as np
import pytest
import torch
from encoder_checkpoints import make_encoder
from encoder_prompts import PROMPTS, SETTINGS, hidden_states, plain, prompts, text, vectors, word_tokenizer
from safetensors.numpy import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextForSequenceClassification

from jpaged import LLM, PoolingParams, SamplingParams

RNG = np.random.default_rng(2)
UP, DOWN = (RNG.normal(size=size).astype(np.float32) for size in ((80, 48), (48, 80)))


def write_modules(folder):
    """Write the modules of EmbeddingGemma's folder: a mean, two Dense modules without bias, a norm, and prompts."""
    kinds = "Transformer", "Pooling", "Dense", "Dense", "Normalize"
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True})
    )
    for path, matrix in (("2_Dense", UP), ("3_Dense", DOWN)):
        outputs, inputs = matrix.shape
        fields = {"in_features": inputs, "out_features": outputs, "bias": False}
        said = fields | {"activation_function": "torch.nn.modules.linear.Identity"}
        (folder / path / "config.json").write_text(json.dumps(said))
        save_file({"linear.weight": matrix}, folder / path / "model.safetensors")
    about = {"prompts": {"query": "w9 w8 w7 ", "document": "w10 "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedding_gemma")
    judge = make_encoder("embedding_gemma", folder)
    word_tokenizer().save_pretrained(folder)
    write_modules(folder)
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm, judge


def test_an_embedding_gemma_gives_transformers_states_through_the_kernels_windows(gemma):
    llm, judge = gemma
    expected = [states.mean(0) for states in hidden_states(judge)]
    outputs = llm.embed(prompts(), False, plain("mean"))
    through = [DOWN @ (UP @ one) for one in expected]
    np.testing.assert_allclose(vectors(outputs), through, rtol=2e-5, atol=2e-3)


def test_its_prompts_and_dense_modules_are_those_of_its_folder(gemma):
    llm, judge = gemma
    (output,) = llm.embed(text([5, 6, 30]), False, PoolingParams(prompt_name="query"))
    ids = [2, 9, 8, 7, 5, 6, 30, 3]
    assert output.prompt_token_ids == ids
    with torch.no_grad():
        state = judge(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    expected = DOWN @ (UP @ state)
    np.testing.assert_allclose(output.outputs.embedding, expected / np.linalg.norm(expected), atol=2e-5)


def test_it_keeps_no_kv_and_generates_nothing(gemma):
    llm, _ = gemma
    assert llm.memory_report().groups == ()
    with pytest.raises(ValueError, match="no vocabulary's head"):
        llm.generate(prompts(PROMPTS[:1]), SamplingParams(max_tokens=1), use_tqdm=False)


def test_a_checkpoint_with_a_vocabularys_head_is_an_encoder_too(tmp_path):
    judge = make_encoder("embedding_gemma", tmp_path, Gemma3ForCausalLM)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = vectors(llm.embed(prompts(), False, plain("mean")))
        with pytest.raises(ValueError, match="no vocabulary's head"):
            llm.generate(prompts(PROMPTS[:1]), SamplingParams(max_tokens=1), use_tqdm=False)
    np.testing.assert_allclose(found, [states.mean(0) for states in hidden_states(judge.model)], atol=3e-5)


def test_its_head_for_classes_reads_the_last_token(tmp_path):
    judge = make_encoder("embedding_gemma", tmp_path, Gemma3TextForSequenceClassification, num_labels=4)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = [output.outputs.logits for output in llm.classify(prompts(), use_tqdm=False)]
    with torch.no_grad():
        expected = [judge(input_ids=torch.tensor([ids])).logits[0].numpy() for ids in PROMPTS]
    np.testing.assert_allclose(found, expected, atol=3e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_config_that_is_not_causal_makes_any_decoder_an_encoder(name, tmp_path):
    judge = make_encoder(name, tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = vectors(llm.embed(prompts(), False, plain("mean")))
    np.testing.assert_allclose(found, [states.mean(0) for states in hidden_states(judge)], atol=3e-5)

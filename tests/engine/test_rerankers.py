"""Rerankers that answer by a token (Qwen3-Reranker) score pairs as transformers' two logits do."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from checkpoints import CHECKPOINTS
from safetensors.numpy import load_file, save_file
from tiny_chat_model import tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from jpaged import LLM, SamplingParams
from jpaged.loading import convert_checkpoint

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 120, "block_size": 8}
QUERIES = ["where is the cab", "is it far", "what a day"]
TEXTS = ["the cab is at the far end of the road", "no", "it was a day of rain and of little else"]
INSTRUCTION = "find it"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<s>ab{% endif %}{{ ending }}"
)
NO, YES = "n", "y"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def plain(request, tmp_path_factory):
    """A folder that says nothing of a reranker."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(1)
    config = CHECKPOINTS["qwen3"]
    config = config.__class__(**config.to_dict() | {"tie_word_embeddings": request.param})
    Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    made = tokenizer()
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reranker(plain, tmp_path_factory):
    """The same with the files that Qwen3-Reranker's folder has for sentence-transformers."""
    folder = copied(plain, tmp_path_factory.mktemp("reranker"))
    types = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(types.items())
    ]
    made = AutoTokenizer.from_pretrained(folder)
    ids = made.convert_tokens_to_ids([YES, NO])
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    fields = {"true_token_id": ids[0], "false_token_id": ids[1], "module_input_name": "causal_logits"}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(fields))
    about = {"model_type": "CrossEncoder", "prompts": {"web": INSTRUCTION}, "default_prompt_name": "web"}
    about["activation_fn"] = "torch.nn.modules.activation.Sigmoid"
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    template = {"add_generation_prompt": True, "ending": "!", "restore_suffix": True}
    logits = {"method": "forward", "method_output_name": "logits"}
    settings = {
        "transformer_task": "text-generation",
        "modality_config": {"text": logits, "message": logits | {"format": "flat"}},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": template},
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return folder


def copied(folder, to):
    return shutil.copytree(folder, to, dirs_exist_ok=True)


def prompt_of(query, text, system=None, ending=""):
    before = "" if system is None else f"<s>system: {system}"
    return f"{before}<s>query: {query}<s>document: {text}<s>ab{ending}"


def judged(folder, prompts):
    model, tokens = AutoModelForCausalLM.from_pretrained(folder).float(), AutoTokenizer.from_pretrained(folder)
    both = tokens.convert_tokens_to_ids([NO, YES])
    found = []
    for prompt in prompts:
        with torch.no_grad():
            logits = model(**tokens(prompt, return_tensors="pt", add_special_tokens=False)).logits[0, -1]
        found.append(logits[both].softmax(-1)[1].item())
    return found


def scores(outputs):
    return [output.outputs.score for output in outputs]


def test_a_folder_with_a_logit_score_module_scores_by_its_tokens_template_and_prompt(reranker):
    with LLM(str(reranker), **SETTINGS) as llm:
        outputs = llm.score(QUERIES, TEXTS, use_tqdm=False)
        with pytest.raises(ValueError, match=r"by the tokens of its answer: only generate\(\) and score\(\)"):
            llm.embed("a", use_tqdm=False)
        (generated,) = llm.generate("a", SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    expected = [prompt_of(*pair, INSTRUCTION, "!") for pair in zip(QUERIES, TEXTS, strict=True)]
    tokens = AutoTokenizer.from_pretrained(reranker)
    assert [tokens.decode(output.prompt_token_ids) for output in outputs] == expected
    np.testing.assert_allclose(scores(outputs), judged(reranker, expected), atol=1e-5)
    assert len(generated.outputs[0].token_ids) == 2


def test_a_folder_whose_pairs_are_no_messages_is_refused(reranker, tmp_path):
    copied(reranker, tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"transformer_task": "text-generation"}))
    refusal = pytest.raises(ValueError, match=r"by LogitScore \(modules.json\), which is not read")
    with LLM(str(tmp_path), **SETTINGS) as llm, refusal:
        llm.score("a", "b", use_tqdm=False)


def test_a_setting_chooses_the_tokens_where_the_folder_names_none(plain):
    with LLM(str(plain), classifier_from_token=[NO, YES], **SETTINGS) as llm:
        assert llm.config.classifier_from_token == (NO, YES)
        found = scores(llm.score(QUERIES[0], TEXTS, use_tqdm=False))
    np.testing.assert_allclose(found, judged(plain, [prompt_of(QUERIES[0], text) for text in TEXTS]), atol=1e-5)


def test_the_form_for_classification_gives_the_same_score_of_the_same_text(plain, tmp_path):
    tensors = load_file(plain / "model.safetensors")
    table = tensors.pop("lm_head.weight", tensors["model.embed_tokens.weight"])
    no, yes = AutoTokenizer.from_pretrained(plain).convert_tokens_to_ids([NO, YES])
    copied(plain, tmp_path)
    save_file(tensors | {"score.weight": table[[yes]] - table[[no]]}, tmp_path / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    said = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    whole = prompt_of(QUERIES[0], TEXTS[0])
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = scores(llm.score(whole[:20], whole[20:], use_tqdm=False))
    cut_in_two = AutoTokenizer.from_pretrained(plain)(whole[:20], whole[20:], add_special_tokens=False)["input_ids"]
    np.testing.assert_allclose(found, judged_ids(plain, cut_in_two), atol=1e-5)


def judged_ids(folder, ids):
    model, tokens = AutoModelForCausalLM.from_pretrained(folder).float(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    return [logits[tokens.convert_tokens_to_ids([NO, YES])].softmax(-1)[1].item()]


def test_a_converted_checkpoint_scores_as_its_source(reranker, tmp_path):
    convert_checkpoint(reranker, tmp_path / "orbax")
    with LLM(str(tmp_path / "orbax"), **SETTINGS) as llm:
        found = scores(llm.score(QUERIES[:1], TEXTS[:1], use_tqdm=False))
    np.testing.assert_allclose(found, judged(reranker, [prompt_of(QUERIES[0], TEXTS[0], INSTRUCTION, "!")]), atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("yes", "no", "maybe"), "must be one or two tokens"),
        (("n", "n"), "has one token twice"),
        (("no way", "y"), "has 'no way', which is . tokens of the model; it must be 1"),
    ],
)
def test_other_tokens_are_refused(plain, tokens, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(plain), classifier_from_token=tokens, **SETTINGS)

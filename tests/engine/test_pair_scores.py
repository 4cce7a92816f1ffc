"""A model with a head for one class scores pairs of texts as transformers does; one with several is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import CHECKPOINTS
from tiny_chat_model import tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3ForSequenceClassification

from jpaged import LLM

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 80, "block_size": 8}
QUERIES = ["where is the cab", "is it far", "what a day"]
TEXTS = ["the cab is at the far end of the road", "no", "it was a day of rain and of little else"]


def save(folder: Path, labels: int) -> str:
    torch.manual_seed(1)
    config = CHECKPOINTS["qwen3"]
    config = config.__class__(**config.to_dict() | {"num_labels": labels, "pad_token_id": 0})
    Qwen3ForSequenceClassification(config).eval().save_pretrained(folder)
    made = tokenizer()
    ids = [("<s>", made.bos_token_id), ("</s>", made.eos_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B </s>", special_tokens=ids
    )
    made.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("cross"), labels=1)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **SETTINGS) as llm:
        yield llm


def judged(folder, first, second):
    model, tokens = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for pair in zip(first, second, strict=True):
        with torch.no_grad():
            found.append(model.float()(**tokens(*pair, return_tensors="pt")).logits.sigmoid().item())
    return found


def scores(outputs):
    return [output.outputs.score for output in outputs]


def test_a_pair_is_read_as_one_prompt_and_scored_by_the_head(llm, folder):
    outputs = llm.score(QUERIES, TEXTS, use_tqdm=False)
    np.testing.assert_allclose(scores(outputs), judged(folder, QUERIES, TEXTS), atol=1e-5)
    tokens = AutoTokenizer.from_pretrained(folder)
    assert [output.prompt_token_ids for output in outputs] == tokens(QUERIES, TEXTS)["input_ids"]
    one_to_many = llm.score(QUERIES[0], TEXTS, use_tqdm=False)
    np.testing.assert_allclose(scores(one_to_many), judged(folder, QUERIES[:1] * 3, TEXTS), atol=1e-5)
    swapped = llm.score(TEXTS, QUERIES, use_tqdm=False)
    np.testing.assert_allclose(scores(swapped), judged(folder, TEXTS, QUERIES), atol=1e-5)


def test_a_pair_that_is_too_long_or_no_text_is_refused(llm):
    with pytest.raises(ValueError, match=r"data_2\[1\]: the prompt has \d+ tokens, above max_model_len=80"):
        llm.score(["a", "b"], ["c", "d " * 60], use_tqdm=False)
    with pytest.raises(ValueError, match=r"data_1\[0\]=\[5, 6\] must be text"):
        llm.score([5, 6], "a", use_tqdm=False)
    with pytest.raises(
        ValueError, match=r"has no vocabulary's head .*: only embed\(\), classify\(\) and score\(\) of pai"
    ):
        llm.score("a", use_tqdm=False)
    (cut,) = llm.score("b", "d " * 60, use_tqdm=False, tokenization_kwargs={"truncation": True, "max_length": 9})
    assert len(cut.prompt_token_ids) == 9


def test_a_pair_with_a_text_far_above_the_limit_is_refused_or_cut_without_tokenizing_all_of_it(llm, monkeypatch):
    text = "the cab is at the far end of the road\n" * 20_000
    joined = llm.get_tokenizer()("a", text)["input_ids"]
    cut = {"truncation": True, "max_length": 9}
    longest, kind = [], type(llm.tokenizer)
    encode = kind.__call__

    def watched(self, text, text_pair=None, **options):
        longest.append(max(map(len, (text, text_pair or ""))))
        return encode(self, text, text_pair, **options)

    monkeypatch.setattr(kind, "__call__", watched)
    for pair in (("a", text), (text, "a")):
        with pytest.raises(ValueError, match=r"data_[12]: the prompt has 760000 characters, .* than max_model_len=80"):
            llm.score(*pair, use_tqdm=False)
    (short,) = llm.score("a", text, use_tqdm=False, tokenization_kwargs=cut)
    assert short.prompt_token_ids == joined[-9:]
    assert 0 < max(longest) < 10_000


def test_a_model_of_several_classes_is_refused(tmp_path):
    with LLM(save(tmp_path, labels=3), **SETTINGS) as llm:
        with pytest.raises(ValueError, match=r"has 3 classes: score\(\) of pairs needs a model with one, or with none"):
            llm.score("a", "b", use_tqdm=False)
        with pytest.raises(ValueError, match=r"only embed\(\) and classify\(\)$"):
            llm.generate("a", use_tqdm=False)


@pytest.mark.parametrize(
    "said",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_scores_after_the_identity_are_the_heads_own_numbers(llm, folder, tmp_path, said):
    (probability,) = scores(llm.score(QUERIES[0], TEXTS[0], use_tqdm=False))
    with LLM(described(folder, tmp_path, said), **SETTINGS) as plain:
        (number,) = scores(plain.score(QUERIES[0], TEXTS[0], use_tqdm=False))
    assert 1 / (1 + np.exp(-number)) == pytest.approx(probability, abs=1e-5)


def test_scores_after_another_activation_are_refused(folder, tmp_path):
    said = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    refusal = pytest.raises(ValueError, match="asks for scores after Tanh; known are Sigmoid and Identity")
    with LLM(described(folder, tmp_path, said), **SETTINGS) as llm, refusal:
        llm.score("a", "b", use_tqdm=False)


def described(folder, to, said):
    """Copy a model's folder, with more fields in its config."""
    for file in Path(folder).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | said))
    return str(to)

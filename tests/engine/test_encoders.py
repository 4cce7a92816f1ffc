"""Encoders, which keep no KV: vectors and classes of tiny random checkpoints equal those of transformers on torch."""

import json

import numpy as np
import pytest
import torch
from encoder_checkpoints import make_encoder
from encoder_prompts import PROMPTS, SETTINGS, hidden_states, plain, prompts, text, vectors, word_tokenizer
from safetensors.numpy import save_file
from transformers import BertForSequenceClassification

from jpaged import LLM, PoolingParams, SamplingParams
from jpaged.engine.stats import describe
from jpaged.metrics import Gauge


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bert")


@pytest.fixture(scope="module")
def hidden(folder):
    return hidden_states(make_encoder("bert", folder))


@pytest.fixture(scope="module")
def llm(folder, hidden):
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


def test_every_pooling_is_that_of_transformers_hidden_states(llm, hidden):
    pooled = {
        "cls": [states[0] for states in hidden],
        "last": [states[-1] for states in hidden],
        "mean": [states.mean(0) for states in hidden],
        "max": [states.max(0) for states in hidden],
        "mean_sqrt_len": [states.sum(0) / np.sqrt(len(states)) for states in hidden],
    }
    each = [plain(list(pooled)[i % 5]) for i in range(len(PROMPTS))]  # in one batch
    for params, mine, number in zip(each, vectors(llm.embed(prompts(), False, each)), range(9), strict=False):
        np.testing.assert_allclose(mine, pooled[params.pooling][number], atol=2e-5)
    for pooling, expected in pooled.items():
        np.testing.assert_allclose(vectors(llm.embed(prompts(), False, plain(pooling))), expected, atol=2e-5)


def test_a_model_that_keeps_nothing_has_an_empty_pool_and_computes_each_prompt_in_one_step(llm):
    before = llm.stats()
    llm.embed(prompts(), use_tqdm=False)
    after = llm.stats()
    assert llm.memory_report().groups == () and llm.memory_report().num_pages == 0
    assert "pool of 0 B" in str(llm.memory_report())
    assert after.num_computed_tokens - before.num_computed_tokens == sum(map(len, PROMPTS))
    assert after.num_preemptions == 0 and after.prefix_hits == 0
    assert Gauge("jpaged:kv_cache_usage_perc", 0.0) in llm.get_metrics()
    assert "0.0% of the KV pool in use" in describe(before, after, 1.0), "the log's line"
    assert after.num_steps - before.num_steps < len(PROMPTS), "several prompts share a step"


def test_vectors_do_not_depend_on_the_batch(llm):
    together = vectors(llm.embed(prompts(), use_tqdm=False))
    alone = [vectors(llm.embed([one], use_tqdm=False))[0] for one in prompts()]
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_an_encoder_generates_nothing(llm):
    with pytest.raises(ValueError, match="no vocabulary's head"):
        llm.generate(prompts(PROMPTS[:1]), SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(ValueError, match="needs pairs"):
        llm.score(prompts(PROMPTS[:1]))


def test_a_prompt_above_the_models_positions_is_refused(llm):
    with pytest.raises(ValueError, match="above max_model_len=72"):
        llm.embed([{"prompt_token_ids": [5] * 73}], use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 73}, "above the 72 positions"),
        ({"max_model_len": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens=32 is below max_model_len=64"),
        ({"enable_lora": True}, "enable_lora=True does not go with"),
        ({"long_prefill_token_threshold": 8}, "long_prefill_token_threshold=8 does not go with"),
        ({"deterministic": True}, "deterministic=True does not go with"),
    ],
)
def test_settings_that_need_kv_or_chunks_are_refused(folder, hidden, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **{**SETTINGS, **settings})


# ---------------------------------------------------------------- a folder of sentence-transformers with a head

DENSE = np.random.default_rng(1).normal(size=(20, 48)).astype(np.float32)
MOST = 12


def write_modules(folder):
    """A pooling of first tokens, a Dense module, a norm, prompts, and texts of at most `MOST` tokens."""
    names = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in names.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in ("1_Pooling", "2_Dense"):
        (folder / path).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    dense = {"in_features": 48, "out_features": 20, "activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": DENSE, "linear.bias": DENSE[:, 0].copy()}, folder / "2_Dense" / "model.safetensors")
    about = {"prompts": {"query": "w9 w8 ", "document": ""}, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MOST}))


@pytest.fixture(scope="module")
def headed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("headed")
    judge = make_encoder("bert", folder, BertForSequenceClassification, num_labels=1)
    word_tokenizer().save_pretrained(folder)
    write_modules(folder)
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm, judge


def first_state(judge, ids):
    with torch.no_grad():
        return judge.bert(input_ids=torch.tensor([ids])).last_hidden_state[0, 0].numpy()


def test_vectors_go_through_the_folders_pooling_dense_module_and_norm(headed):
    llm, judge = headed
    short, long = PROMPTS[5] + [7], PROMPTS[1]
    outputs = llm.embed([text(short), text(long)], use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == [5, MOST], "as sentence-transformers cuts it"
    for output, ids in zip(outputs, ([2, *short, 3], [2, *long[: MOST - 2], 3]), strict=True):
        assert output.prompt_token_ids == ids
        expected = np.tanh(DENSE @ first_state(judge, ids) + DENSE[:, 0])
        np.testing.assert_allclose(output.outputs.embedding, expected / np.linalg.norm(expected), atol=2e-5)


def test_a_prompt_name_puts_the_folders_text_before_the_prompts(headed):
    llm, _ = headed
    named, plain_text = (
        llm.embed(one, False, PoolingParams(prompt_name=name))[0]
        for one, name in (("w5 w6", "query"), ("w9 w8 w5 w6", None))
    )
    assert named.prompt_token_ids == [2, 9, 8, 5, 6, 3]
    assert named.outputs == plain_text.outputs
    with pytest.raises(ValueError, match="'passage' is none of the model's prompts: 'query', 'document'"):
        llm.embed("w5", False, PoolingParams(prompt_name="passage"))


def test_a_cross_encoder_tells_the_second_text_from_the_first(headed):
    llm, judge = headed
    first, second = [5, 6, 7], [8, 9]
    ids, kinds = [2, *first, 3, *second, 3], [0] * 5 + [1] * 3
    (output,) = llm.score(text(first), text(second), use_tqdm=False)
    assert output.prompt_token_ids == ids
    with torch.no_grad():
        logit = judge(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([kinds])).logits.item()
    np.testing.assert_allclose(output.outputs.score, 1 / (1 + np.exp(-logit)), atol=2e-5)

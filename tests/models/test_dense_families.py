"""Every row of `models/families.py` computes what transformers computes, alone and in an engine under stress."""

import numpy as np
import pytest
import torch
from checkpoints import CHECKPOINTS, make_checkpoint
from dense_families import DENSE_FAMILIES
from dense_model import load, run_dense, stored_tensors
from greedy_reference import random_prompts, torch_logprobs
from wrapped_families import BY_THEIR_TEXT

from jpaged import LLM, SamplingParams
from jpaged_models.families import FAMILIES

TOKENS = np.random.default_rng(0).integers(3, 200, 40)
"""Longer than the windows and than the original contexts that are stretched."""
PROMPTS = random_prompts(lengths=(20, 33, 41))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": 56,
    "max_num_seqs": 2,
    "enable_prefix_caching": False,
    "enforce_eager": True,
}
PAGES = {"phi3": 4, "starcoder2": 4}
"""Pages of a pool that holds the longest request, but not two: 9, fewer where all layers have a window."""
BY_DAY = ("phi3", "glm4")
"""Checkpoints that an engine runs in every test run: a window in all layers, and a layer with all norms."""


@pytest.fixture(scope="module", params=DENSE_FAMILIES)
def checkpoint(request, tmp_path_factory):
    """(path, transformers' logits at every position of `TOKENS`, those of the model on one device)."""
    path = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(request.param, path)
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)[None]).logits[0].numpy()
    return path, expected, run_dense(load(path), TOKENS)


def test_every_row_has_a_checkpoint():
    named = {config.model_type for config in (DENSE_FAMILIES | CHECKPOINTS).values()}
    named |= {config.get_text_config().model_type for _, config in BY_THEIR_TEXT.values()}
    assert set(FAMILIES) <= named


def test_logits_equal_transformers(checkpoint):
    _, expected, found = checkpoint
    assert 0.5 < expected.std() < 2, "the test model's logits should differ between tokens by about one"
    np.testing.assert_allclose(found, expected, atol=3e-5, rtol=0)


def test_stacks_and_shards_compute_the_same(checkpoint):
    path, _, found = checkpoint
    both = run_dense(load(path, tensor_parallel=4, stacked=True), TOKENS)
    np.testing.assert_allclose(both[:, : found.shape[1]], found, atol=1e-5, rtol=0)
    assert np.isneginf(both[:, found.shape[1] :]).all()


def test_every_tensor_of_the_checkpoint_is_read_once(checkpoint):
    model = load(checkpoint[0])
    read = [name for source in model.weights() for name in source.sources]
    assert sorted(read) == sorted(stored_tensors(checkpoint[0], model).names())


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in DENSE_FAMILIES]
)
def test_an_engine_gives_the_tokens_and_log_probabilities_of_transformers(name, tmp_path):
    """In one step a prompt, and in chunks with a pool that two long requests do not fit into."""
    model = make_checkpoint(name, tmp_path)
    with LLM(str(tmp_path), max_num_batched_tokens=128, **SETTINGS) as roomy:
        outputs = generate(roomy)
        tight = PAGES.get(name, 9) * roomy.memory_report().page_bytes
    assert_like_transformers(outputs, model)
    with LLM(str(tmp_path), max_num_batched_tokens=16, kv_cache_memory_bytes=tight, **SETTINGS) as llm:
        outputs = generate(llm)
    assert_like_transformers(outputs, model)


def test_longrope_takes_the_factors_of_the_longest_sequence_that_an_engine_allows(tmp_path):
    """transformers takes the short factors up to 16 tokens, the original context."""
    model = make_checkpoint("phi3-longrope", tmp_path)
    short, settings = random_prompts(lengths=(3, 8)), SETTINGS | {"enable_prefix_caching": True}
    with LLM(str(tmp_path), **settings | {"max_model_len": 16}) as llm:
        assert_like_transformers(generate(llm, short), model)
        llm.save_state(tmp_path / "state")
    for longest, num_hits in (16, 8), (17, 0):  # keys that were turned by other factors are computed again
        with LLM.restore_state(tmp_path / "state", max_model_len=longest) as llm:
            llm.generate([{"prompt_token_ids": [*short[1], 5]}], SamplingParams(max_tokens=1), use_tqdm=False)
            assert llm.stats().prefix_hits == num_hits
    with LLM(str(tmp_path), **SETTINGS) as llm:
        (output,) = generate(llm, short[:1])
    tokens = list(output.outputs[0].token_ids)
    found = [logprobs[token].logprob for token, logprobs in zip(tokens, output.outputs[0].logprobs, strict=True)]
    expected = torch_logprobs(model, short[0], [tokens])[0]
    assert np.abs(np.subtract(found, expected)).max() > 1e-3, "the long factors differ from the short ones"


def generate(llm, prompts=PROMPTS):
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)


def assert_like_transformers(outputs, model):
    for output in outputs:
        (one,), prompt = output.outputs, output.prompt_token_ids
        tokens = list(one.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values.tolist()
        for token, place, (first, second) in zip(tokens, logits.argmax(-1).tolist(), best, strict=True):
            assert token == place or first - second < 1e-4
        expected = torch_logprobs(model, prompt, [tokens])[0]
        found = [logprobs[token].logprob for token, logprobs in zip(tokens, one.logprobs, strict=True)]
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)

"""Log-probabilities for training are the engine's, and their derivatives those of torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint

from jpaged import LLM, SamplingParams
from jpaged.loading import load_model
from jpaged.training import TrainableModel, logprobs

SETTINGS = {"dtype": "float32", "max_model_len": 128, "block_size": 8, "max_num_seqs": 6}
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 211, n).tolist() for n in (5, 23, 9, 2, 40)]
SAMPLED = SamplingParams(temperature=1.0, seed=4, max_tokens=30, ignore_eos=True, logprobs=0, prompt_logprobs=0)
NIGHTLY = ("qwen3", "gpt_oss", "llama-shared-kv", "qwen3_next", "jamba", "mistral-window")
FAMILIES = ("smollm2", "gemma3", "mixtral", "mamba2", "deepseek_v2", "gemma4", "llama4", "lfm2")


def rolled_out(llm: LLM, left: bool = False):
    """Return tokens, mask and the engine's log-probabilities of all tokens but the first, padded; `left`: before."""
    outputs = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
    rows = []
    for output in outputs:
        answer = output.outputs[0]
        given = [next(iter(of.values())).logprob for of in output.prompt_logprobs[1:]]
        drawn = [of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs, strict=True)]
        rows.append(([*output.prompt_token_ids, *answer.token_ids], [0.0, *given, *drawn]))
    width = max(len(tokens) for tokens, _ in rows)
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    engine = np.zeros((len(rows), width), np.float32)
    for row, (its, scores) in enumerate(rows):
        here = slice(width - len(its), width) if left else slice(len(its))
        tokens[row, here], mask[row, here], engine[row, here] = its, True, scores
    return tokens, mask, engine[:, 1:]


@pytest.fixture
def folder(tmp_path, request):
    make_checkpoint(request.param, tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    "folder", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)], indirect=True
)
def test_they_agree_with_the_engine_and_to_the_bit_where_it_is_deterministic(folder):
    with LLM(folder, deterministic=True, **SETTINGS) as llm:
        tokens, mask, engine = rolled_out(llm)
        plain = logprobs(llm, llm.params, tokens, mask)
        np.testing.assert_allclose(plain, engine, atol=1e-5)
        exact = logprobs(llm, llm.params, tokens, mask, deterministic=True)
        np.testing.assert_array_equal(exact, engine)

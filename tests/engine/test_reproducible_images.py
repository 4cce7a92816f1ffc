"""With `deterministic` a token's log-probability has the same bits however its request and its images are served."""

from __future__ import annotations

import numpy as np
import pytest
from vision_checkpoints import FAMILIES, check_empty, picture, prompt_of

from jpaged import LLM, NGram, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 160,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 4 << 20,
    "deterministic": True,
}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True, logprobs=2, prompt_logprobs=0)
SMALL, WIDE, TALL = picture(0), picture(1, (20, 70)), picture(2, (90, 30))
PARTS = [(20, SMALL, 30, WIDE, 3), (SMALL, TALL, 2), (40,), (2, TALL, 33)]


@pytest.fixture(
    scope="module", params=["gemma3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mllama", "llava"))]
)
def family(request, tmp_path_factory):
    """A checkpoint, its prompts, and what each is answered alone."""
    make, placeholder = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    make(folder)
    prompts = [prompt_of(parts, seed, placeholder) for seed, parts in enumerate(PARTS)]
    llm = LLM(str(folder), **SETTINGS)
    alone = [bits(llm.generate(prompt, PARAMS, use_tqdm=False)[0]) for prompt in prompts]
    llm.reset_prefix_cache()
    return str(folder), prompts, alone, llm


def bits(output):
    """Tokens and log-probabilities of an answer, and those of its prompt."""
    (one,) = output.outputs
    ranked = [sorted((token, found.logprob) for token, found in each.items()) for each in one.logprobs]
    prompt = [sorted(found.logprob for found in each.values()) for each in output.prompt_logprobs[1:]]
    return one.token_ids, ranked, prompt


def test_a_batch_computes_what_each_computes_alone_with_prefix_hits_too(family):
    _, prompts, alone, llm = family
    for _ in range(2):
        assert [bits(output) for output in llm.generate(prompts, PARAMS, use_tqdm=False)] == alone


SERVINGS = {
    "chunks": {"long_prefill_token_threshold": 24, "max_num_batched_tokens": 48},
    "preempted": {"pages": 24, "preemption_mode": "swap"},
    "recomputed": {"pages": 24, "preemption_mode": "recompute"},
    "speculating": {"speculative": NGram(tokens=3)},
}


@pytest.mark.parametrize("name", ["chunks", *(pytest.param(n, marks=pytest.mark.nightly) for n in [*SERVINGS][1:])])
def test_however_it_is_served_the_bits_are_the_same(family, name):
    model, prompts, alone, llm = family
    settings = SETTINGS | SERVINGS[name]
    if (pages := settings.pop("pages", None)) is not None:
        page = llm.memory_report().page_bytes
        settings["kv_cache_memory_bytes"] = max(45 * 9216 // page, pages) * page
    other = LLM(model, **settings)
    assert [bits(output) for output in other.generate(prompts, PARAMS, use_tqdm=False)] == alone
    check_empty(other)


def test_tokens_are_those_of_an_engine_that_is_not_deterministic_up_to_rounding(family):
    model, prompts, alone, _ = family
    usual = LLM(model, **SETTINGS | {"deterministic": False})
    for output, wanted in zip(usual.generate(prompts, PARAMS, use_tqdm=False), alone, strict=True):
        np.testing.assert_allclose(np.ravel(bits(output)[2]), np.ravel(wanted[2]), atol=1e-4)


def test_after_the_warm_up_nothing_compiles(family):
    model, prompts, _, _ = family
    llm = LLM(model, **SETTINGS)
    assert llm.warmup(use_tqdm=False) == llm.control.engine.runner.num_warmup
    llm.generate(prompts, SamplingParams(max_tokens=3), use_tqdm=False)
    assert llm.num_recompiles == 0


@pytest.mark.nightly
def test_room_for_adapters_changes_no_bit_of_a_prompt_with_images(family):
    model, prompts, alone, _ = family
    if "mllama" in model:
        with pytest.raises(ValueError, match="enable_lora"):
            LLM(model, **SETTINGS, enable_lora=True)
        return
    llm = LLM(model, **SETTINGS, enable_lora=True, max_lora_rank=4)
    assert [bits(output) for output in llm.generate(prompts, PARAMS, use_tqdm=False)] == alone

"""Drafts beside recurrent layers change no token: a step leaves a state behind each of them, and goes on from the right
one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checkpoints import make_checkpoint
from draft_settings import SETTINGS, make_drafts_free

from jpaged import LLM, DraftModel, Layers, NGram, SamplingParams

RNG = np.random.default_rng(7)
FEW = RNG.integers(3, 211, 5)
PROMPTS = [RNG.choice(FEW, int(n)).tolist() for n in (5, 11, 30, 45, 23, 8)]
"""Prompts of few tokens, so that drafts are found for almost every place, and kept for some."""
SAMPLED = SamplingParams(temperature=1.2, max_tokens=40, ignore_eos=True, allowed_token_ids=FEW.tolist())
PARAMS = [replace(SAMPLED, seed=i, n=1 + 2 * (i == 2)) for i in range(len(PROMPTS))]
NGRAM = NGram(5, longest=3, shortest=1)


@pytest.fixture(autouse=True)
def all_drafts(monkeypatch):
    make_drafts_free(monkeypatch)


SMALL_POOL = {"mamba2": 40, "jamba": 70, "bamba": 30, "qwen3_next": 70, "qwen3_5": 70, "lfm2": 26}
"""Checkpoint -> large pages with which sequences run out of memory, though each request fits on its own."""


def at_night(name):
    return name if name == "mamba2" else pytest.param(name, marks=pytest.mark.nightly)


@pytest.fixture(scope="module", params=map(at_night, SMALL_POOL))
def family(request, tmp_path_factory):
    """(A checkpoint's folder, its engine without drafts, what that gives, and large pages that are few.)"""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder)
    plain = LLM(str(folder), **SETTINGS)
    return str(folder), plain, tokens(plain), SMALL_POOL[request.param]


def serve(llm, prompts=PROMPTS):
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
    memory = llm.control.engine.memory
    memory.check_invariants()
    assert memory.num_used_blocks == 0
    return outputs


def tokens(llm, prompts=PROMPTS):
    return [[o.token_ids for o in output.outputs] for output in serve(llm, prompts)]


def test_forks_swaps_and_prefix_hits_with_drafts_give_the_tokens_without(family):
    folder, plain, want, pages = family
    size = pages * plain.memory_report().page_bytes
    drafting = LLM(folder, speculative=NGRAM, preemption_mode="swap", kv_cache_memory_bytes=size, **SETTINGS)
    outputs = serve(drafting)
    assert [[o.token_ids for o in output.outputs] for output in outputs] == want
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    stats = drafting.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    longer = [prompt + found[0][:-1] for prompt, found in zip(PROMPTS, want, strict=True)]
    assert tokens(drafting, longer) == tokens(plain, longer)


@pytest.mark.nightly
def test_first_layers_and_draft_models_have_states_of_their_own(family):
    """The model itself as its draft loses none: its draws are the same, so its states are."""
    folder, _, want, _ = family
    for way in (Layers(1, tokens=3), DraftModel(folder, tokens=3)):
        drafting = LLM(folder, speculative=way, **SETTINGS)
        assert tokens(drafting) == want
        assert drafting.stats().num_accepted_tokens > 0
    assert drafting.stats().acceptance_rate > 0.97


@pytest.mark.nightly
def test_deterministic_engines_agree_to_the_last_bit(family):
    folder = family[0]
    params = SamplingParams(temperature=1.2, seed=1, max_tokens=24, allowed_token_ids=FEW.tolist(), logprobs=1)
    found = []
    for way in (None, NGRAM):
        llm = LLM(folder, speculative=way, deterministic=True, **SETTINGS)
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        found.append([(o.outputs[0].token_ids, float(o.outputs[0].cumulative_logprob).hex()) for o in outputs])
    assert found[0] == found[1] and llm.stats().num_accepted_tokens > 0

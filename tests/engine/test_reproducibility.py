"""What a sequence is made of: weights, prompt, params and seed, and nothing of how it was served."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_chat_model import VOCAB_SIZE, make_chat_model

from jpaged import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "max_model_len": 160, "block_size": 8, "max_num_seqs": 41}
RNG = np.random.default_rng(5)
PROMPT = RNG.integers(3, VOCAB_SIZE, 45).tolist()
NEIGHBOURS = [RNG.integers(3, VOCAB_SIZE, int(n)).tolist() for n in RNG.integers(2, 60, 40)]
PARAMS = SamplingParams(temperature=1.5, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True, logprobs=3)
OTHERS = SamplingParams(temperature=2.0, seed=3, max_tokens=20, ignore_eos=True)
GREEDY = replace(OTHERS, temperature=0.0)

SERVINGS = {
    "alone": {},
    "in a batch of 40 others": {"neighbours": 40},
    "in a batch of 40 others, submitted last": {"neighbours": 40, "place": 40},
    "in a batch of 40 others, submitted in the middle": {"neighbours": 40, "place": 17},
    "in chunks of 16": {"neighbours": 5, "max_num_batched_tokens": 41, "long_prefill_token_threshold": 16},
    "in chunks of 64": {"neighbours": 5, "max_num_batched_tokens": 64},
    "preempted, recomputed": {"neighbours": 9, "tight": True, "place": 9},
    "preempted, swapped": {"neighbours": 9, "tight": True, "place": 9, "preemption_mode": "swap"},
    "after a prefix hit": {"before": True},
    "after a prefix hit, in a batch": {"before": True, "neighbours": 7},
    "without a prefix cache": {"enable_prefix_caching": False, "neighbours": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reproducible")
    make_chat_model(path)
    return str(path)


@pytest.fixture(scope="module")
def engines(folder):
    """Engines by their settings, made once."""
    return engines_of(folder, few_pages=60)


def engines_of(folder, *, few_pages, **of_all):
    """Return what makes engines of a checkpoint by their settings, each once; with ``tight=True`` they have a pool of
    `few_pages` large pages."""
    made: dict[tuple, LLM] = {}

    def engine(**settings) -> LLM:
        key = tuple(sorted(settings.items()))
        if key not in made:
            if settings.pop("tight", False):
                settings["kv_cache_memory_bytes"] = few_pages * engine().memory_report().page_bytes
            made[key] = LLM(folder, **{"max_num_batched_tokens": 512} | SETTINGS | of_all | settings)
        return made[key]

    return engine


def serve(engines, *, neighbours=0, place=0, before=False, params=PARAMS, **settings):
    """The output of PROMPT under `params`, served as asked."""
    llm = engines(**settings)
    assert llm.control.engine.memory.reset_prefix_cache()
    if before:
        llm.generate([{"prompt_token_ids": PROMPT}], replace(OTHERS, max_tokens=2), use_tqdm=False)
    prompts = [{"prompt_token_ids": ids} for ids in NEIGHBOURS[:neighbours]]
    prompts.insert(place, {"prompt_token_ids": PROMPT})
    each = [GREEDY if i % 3 else OTHERS for i in range(len(prompts))]
    each[place] = params
    mine = llm.generate(prompts, each, use_tqdm=False)[place]
    if before:
        assert mine.num_cached_tokens >= 40
    if settings.get("tight"):
        assert mine.metrics.num_preemptions > 0
    return mine.outputs


@pytest.mark.parametrize("how", [name for name in SERVINGS if name != "alone"])
def test_a_sampled_sequence_depends_on_its_prompt_params_and_seed_only(engines, how):
    (alone,) = serve(engines)
    (served,) = serve(engines, **SERVINGS[how])
    assert served.token_ids == alone.token_ids
    assert served.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)


def bits(output) -> list:
    """Every token's log-probability and those of the most likely ones, as hexadecimal floats."""
    each = [{token: (p.logprob.hex(), p.rank) for token, p in row.items()} for row in output.logprobs]
    return [output.token_ids, float(output.cumulative_logprob).hex(), each]


@pytest.mark.parametrize("how", [name for name in SERVINGS if name != "alone"])
def test_deterministic_log_probabilities_agree_to_the_last_bit(engines, how):
    (alone,) = serve(engines, deterministic=True)
    (served,) = serve(engines, deterministic=True, **SERVINGS[how])
    assert bits(served) == bits(alone)


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_one_of_n_outputs_is_reproducible(engines, deterministic):
    params = replace(PARAMS, n=3)
    alone = serve(engines, deterministic=deterministic, params=params)
    for how in ("in a batch of 40 others", "preempted, recomputed", "preempted, swapped"):
        served = serve(engines, deterministic=deterministic, params=params, **SERVINGS[how])
        assert [output.token_ids for output in served] == [output.token_ids for output in alone]
        if deterministic:
            assert [bits(output) for output in served] == [bits(output) for output in alone]
    assert len({tuple(output.token_ids) for output in alone}) == 3

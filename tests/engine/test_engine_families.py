"""Every family generates what transformers generates: batched, preempted, swapped, in chunks, and from the cache.

Forks and beams have room here for all of them at once. Those that are preempted are tested on toy models and on one
family (`test_parallel_sampling.py`, `test_beam_search.py`), two devices in `test_tensor_parallel.py`.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import thorough
from beam_reference import assert_same_beams, torch_beams
from checkpoints import CHECKPOINTS, make_checkpoint
from few_shapes import run_in_few_shapes
from greedy_reference import (
    GREEDY,
    LENGTHS,
    NUM_TOKENS,
    assert_same_tokens,
    random_prompts,
    torch_greedy,
    torch_logprobs,
)

from jpaged import LLM, BeamSearchParams, SamplingParams

PROMPTS = random_prompts()
FORKED = [ids for ids in PROMPTS if len(ids) in (3, 8, 17, 40)]
LONGEST = sorted(range(len(PROMPTS)), key=lambda i: -len(PROMPTS[i]))[:4]
"""Numbers of the prompts that are sent twice: alone they may well have early ties, four together have few."""
SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": max(LENGTHS) + NUM_TOKENS,
    "enable_prefix_caching": False,
    "state_checkpoint_interval": 8,
}
SMALL_POOL = {
    "llama-rope-llama3": 40,
    "mistral": 40,
    "mistral-window": 12,
    "ministral": 20,
    "qwen2": 40,
    "qwen3": 40,
    "opt": 40,
    "gemma2": 20,
    "gemma3": 12,
    "cohere2": 20,
    "llama4": 20,
    "gpt_oss": 20,
    "mixtral": 40,
    "qwen3_moe": 40,
    "olmo3": 20,
    "gemma4": 20,
    "gemma4-experts": 20,
    "deepseek_v2": 40,
    "deepseek_v3": 40,
    "llama-shared-kv": 40,
    "ministral-shared-kv": 20,
    "jamba": 30,
    "mamba2": 12,
    "bamba": 10,
    "qwen3_next": 22,
    "qwen3_5": 22,
    "qwen3_5_moe": 22,
    "lfm2": 16,
    "lfm2_moe": 24,
    "glm4_moe_lite": 40,
    "mistral4": 40,
    "granite4": 12,
    "nemotron_h": 22,
    "falcon_h1": 30,
    "gpt2": 40,
}
"""Checkpoint -> large pages with which 8 running sequences run out of memory, though each fits on its own."""
NIGHTLY = (
    *("mistral", "qwen2", "qwen3", "opt", "gpt2", "mixtral", "qwen3_moe"),  # like llama-rope-llama3
    *("ministral", "gemma2", "cohere2", "olmo3", "gpt_oss"),  # like gemma3: windows in some layers
    *("deepseek_v3", "glm4_moe_lite", "mistral4"),  # like deepseek_v2
    *("llama-shared-kv", "gemma4-experts"),  # like ministral-shared-kv and gemma4
    *(
        "mamba2",
        "bamba",
        "qwen3_5",
        "qwen3_5_moe",
        "lfm2_moe",
        "granite4",
        "nemotron_h",
        "falcon_h1",
    ),  # like jamba, qwen3_next, lfm2
)
"""Checkpoints whose layers, as the engine sees them, are those of others; `tests/models` tries the models."""


SEVERAL = ("jamba", "lfm2")
"""Checkpoints whose several outputs of a prompt are compared in every run: states beside attention, and states of a
convolution only."""
OTHER_STEPS = ("bamba", "granitemoehybrid", "nemotron_h")
"""Families of which transformers limits the time steps of prompts, and not of tokens that follow from its cache."""


def at_night(name, by_day=None):
    nightly = name in NIGHTLY if by_day is None else name not in by_day
    return pytest.param(name, marks=pytest.mark.nightly) if nightly else name


BY_TRANSFORMERS = [name for name in SMALL_POOL if not name.endswith("-shared-kv")]
several_outputs = pytest.mark.parametrize(
    "family", [at_night(name, SEVERAL) for name in BY_TRANSFORMERS], indirect=True
)


@pytest.fixture(scope="module", params=map(at_night, SMALL_POOL))
def family(request, tmp_path_factory):
    """A checkpoint's folder, an engine with room for all prompts at once, its outputs, and transformers' tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(request.param, folder)
    roomy = LLM(str(folder), max_num_seqs=len(PROMPTS), max_num_batched_tokens=512, **SETTINGS)
    pages = SMALL_POOL[request.param]
    outputs = generate(roomy)
    expected = torch_greedy(model, PROMPTS, guesses=[output.outputs[0].token_ids for output in outputs])
    return SimpleNamespace(
        folder=str(folder), model=model, outputs=outputs, expected=expected, roomy=roomy, small_pool=pages
    )


def tight(family, **changes):
    """An engine of few shapes, as the time goes into compiling; prompts above 24 tokens need several steps."""
    size = family.small_pool * family.roomy.memory_report().page_bytes
    settings = SETTINGS | {"max_num_seqs": 8, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": size}
    llm = LLM(family.folder, **settings | changes)
    run_in_few_shapes(llm)
    return llm


def generate(llm, prompts=PROMPTS, params=GREEDY):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    memory = llm.control.engine.memory
    memory.check_invariants()
    assert memory.num_used_blocks == 0
    return outputs


def test_one_batch_generates_what_transformers_generates(family):
    assert family.roomy.tokenizer is None
    assert_same_tokens(family.outputs, family.expected)
    assert sum(output.metrics.num_preemptions for output in family.outputs) == 0


def test_preemption_and_chunked_prefill_change_no_token(family):
    llm = tight(family)
    outputs = generate(llm)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert llm.control.engine.stats.num_tokens > family.roomy.control.engine.stats.num_tokens, "nothing was recomputed"
    assert_same_tokens(outputs, family.expected)


def test_swapping_and_prefix_hits_change_no_token(family):
    """The prompts that are sent again start far behind the windows of the layers that have one."""
    llm = tight(family, preemption_mode="swap", enable_prefix_caching=True)
    outputs = generate(llm)
    assert sum(output.metrics.num_swaps for output in outputs) > 0
    assert_same_tokens(outputs, family.expected)
    again = []
    for number in LONGEST:
        llm.reset_prefix_cache()
        generate(llm, [PROMPTS[number]], SamplingParams(max_tokens=1))
        again += generate(llm, [PROMPTS[number]])
        assert again[-1].num_cached_tokens == (len(PROMPTS[number]) - 1) // 8 * 8
    assert_same_tokens(again, [family.expected[number] for number in LONGEST], compared=0.8)


@several_outputs
def test_four_forks_of_a_prompt_draw_from_what_transformers_computes(family):
    """All prompts and as many tokens as greedily, where there is the time."""
    prompts, most = (PROMPTS, NUM_TOKENS) if thorough.NIGHTLY else (FORKED, 20)
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=most, ignore_eos=True, logprobs=0)
    for output in generate(family.roomy, prompts, params):
        tokens = [completion.token_ids for completion in output.outputs]
        assert len({tuple(ids) for ids in tokens}) == 4
        found = [
            [top[token].logprob for token, top in zip(o.token_ids, o.logprobs, strict=True)] for o in output.outputs
        ]
        np.testing.assert_allclose(found, torch_logprobs(family.model, output.prompt_token_ids, tokens), atol=1e-3)


@several_outputs
def test_four_beams_are_those_of_transformers(family):
    """From its cache transformers computes some families with other time steps than without: they search without."""
    params, use_cache = BeamSearchParams(4, 16, ignore_eos=True), family.model.config.model_type not in OTHER_STEPS
    outputs = family.roomy.beam_search([{"prompt_token_ids": ids} for ids in FORKED], params, use_tqdm=False)
    assert_same_beams(outputs, torch_beams(family.model, FORKED, params, use_cache=use_cache), params)
    memory = family.roomy.control.engine.memory
    memory.check_invariants()
    assert memory.num_used_blocks == 0


def test_the_checkpoints_are_awkward_and_of_every_family():
    configs = [CHECKPOINTS[name] for name in SMALL_POOL]
    assert {config.model_type for config in configs} == {c.model_type for c in CHECKPOINTS.values()}
    assert {vars(config).get("head_dim") for config in configs} >= {48, 64, 128}
    assert all(config.vocab_size % 2 for config in configs)

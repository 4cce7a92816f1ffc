"""Preemption changes no token: a pool too small for its requests against one that holds them all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from greedy_reference import random_prompts
from tiny_chat_model import make_chat_model

from jpaged import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 16}
PROMPTS = random_prompts(lengths=(3, 9, 17, 20, 24))
PARAMS = [
    SamplingParams(temperature=temperature, seed=11 + i, max_tokens=30, ignore_eos=True)
    for i, temperature in enumerate((0.0, 1.0, 0.0, 1.3, 0.8))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    roomy = LLM(str(folder), **SETTINGS)
    return SimpleNamespace(folder=str(folder), tokens=generate(roomy)[0], page_bytes=roomy.memory_report().page_bytes)


def generate(llm):
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], [output.metrics for output in outputs]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_greedy_and_seeded_tokens_do_not_depend_on_preemption(model, mode, caching):
    llm = LLM(
        model.folder,
        kv_cache_memory_bytes=10 * model.page_bytes,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        **SETTINGS,
    )
    tokens, metrics = generate(llm)
    preemptions, swaps = sum(m.num_preemptions for m in metrics), sum(m.num_swaps for m in metrics)
    assert preemptions > 0 and swaps == (preemptions if mode == "swap" else 0)
    assert llm.control.engine.scheduler.preemption.num_swaps == swaps
    assert tokens == model.tokens
    assert llm.control.engine.memory.num_used_blocks == 0 and len(llm.control.engine.runner.worker.host) == 0
    llm.control.engine.memory.check_invariants()


@pytest.fixture(scope="module")
def four_outputs(model):
    """Two requests of four outputs each, and their tokens where nothing is preempted."""
    params = [SamplingParams(temperature=1.0, seed=5 + i, n=4, max_tokens=20, ignore_eos=True) for i in range(2)]

    def run(**options):
        llm = LLM(model.folder, **(SETTINGS | {"max_num_seqs": 8}), **options)
        prompts = [{"prompt_token_ids": p} for p in PROMPTS[2:4]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[out.token_ids for out in o.outputs] for o in outputs], [o.metrics for o in outputs], llm

    return run, run()[0]


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_four_outputs_do_not_depend_on_preemption(model, four_outputs, mode):
    run, expected = four_outputs
    tokens, metrics, llm = run(kv_cache_memory_bytes=18 * model.page_bytes, preemption_mode=mode)
    preemptions, swaps = sum(m.num_preemptions for m in metrics), sum(m.num_swaps for m in metrics)
    assert preemptions > 0 and swaps == (0 if mode == "recompute" else preemptions)
    assert tokens == expected and len({tuple(t) for request in tokens for t in request}) == 8
    assert llm.control.engine.memory.num_used_blocks == 0 and len(llm.control.engine.runner.worker.host) == 0


def test_a_preemption_of_outputs_in_turns_is_told_once(model):
    """Six outputs run in two turns, each a request of its own; the first gives its places to an urgent prompt."""
    llm = LLM(model.folder, **(SETTINGS | {"max_num_seqs": 3, "scheduling_policy": "priority"}))
    several = SamplingParams(temperature=1.0, seed=5, n=6, max_tokens=9, ignore_eos=True)
    request = llm.input_processor.process({"prompt_token_ids": PROMPTS[3]}, several, 1)
    llm.control.engine.add(request)
    for _ in range(5):
        llm.control.engine.step()
    llm.generate({"prompt_token_ids": PROMPTS[4]}, PARAMS[0], use_tqdm=False, priority=0)
    while llm.control.engine.has_work:
        llm.control.engine.step()
    metrics = llm.output_processor.whole(request).metrics
    assert metrics.num_preemptions == 1
    ((start, end),) = metrics.preempted
    assert start < end


def test_after_the_warm_up_swapping_compiles_nothing(model):
    llm = LLM(model.folder, kv_cache_memory_bytes=10 * model.page_bytes, preemption_mode="swap", **SETTINGS)
    llm.warmup(use_tqdm=False)
    _, metrics = generate(llm)
    assert sum(m.num_swaps for m in metrics) > 0 and llm.num_recompiles == 0


def test_swap_space_is_as_large_as_the_pool_unless_told_and_never_larger(model):
    size = 10 * model.page_bytes
    auto = LLM(model.folder, kv_cache_memory_bytes=size, preemption_mode="auto", **SETTINGS)
    assert auto.memory_report().host_bytes == size
    with pytest.raises(ValueError, match=rf"swap_space_bytes={size + 1:,} is outside \[0, {size:,}\]"):
        LLM(
            model.folder,
            kv_cache_memory_bytes=size,
            preemption_mode="auto",
            swap_space_bytes=size + 1,
            **SETTINGS,
        )
    with pytest.raises(ValueError, match="swap_space_bytes=5 needs preemption_mode='swap' or 'auto'"):
        LLM(model.folder, swap_space_bytes=5, **SETTINGS)

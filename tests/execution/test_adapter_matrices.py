"""What steps read of adapters: put in order once, right after evictions, failures and sleep."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from greedy_reference import random_prompts
from lora_checkpoints import ADAPTERS, save_adapter, save_all

from jpaged import LLM, SamplingParams
from jpaged.execution.device_memory import device_bytes
from jpaged.planning import plan
from jpaged.scheduling.step import AdapterLoad

SETTINGS = {
    "enable_lora": True,
    "max_lora_rank": 6,
    "max_loras": 2,
    "block_size": 8,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "enforce_eager": True,
}
PAGE = 24576
PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(lengths=(9, 17, 21), seed=3)]
NAMES = ["small", "all", "some"]
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_all("llama", tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def llm(llama):
    """An engine that holds an adapter and a sequence at once, hardly two."""
    with LLM(llama[0], **SETTINGS, lora_modules=llama[1], kv_cache_memory_bytes=18 * PAGE) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llama):
    """Return the outputs of an engine that is fresh for each adapter."""
    found = {}
    for name in (None, *NAMES):
        with LLM(llama[0], **SETTINGS, lora_modules=llama[1], kv_cache_memory_bytes=90 * PAGE) as llm:
            found[name] = answers(llm, name)
    assert len(set(map(str, found.values()))) == 4
    return found


@pytest.fixture
def fills(llm, monkeypatch):
    """The calls that put an adapter in order, as they come."""
    made, fill = [], llm.control.engine.runner.worker.adapters._fill

    def counted(key, matrices, pool, blocks, place):
        made.append(int(place))
        return fill(key, matrices, pool, blocks, place)

    monkeypatch.setattr(llm.control.engine.runner.worker.adapters, "_fill", counted)
    return made


def answers(llm, name):
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, SHORT, use_tqdm=False, lora_request=name)]


def test_an_adapter_is_put_in_order_once_however_many_steps_and_batches_run_with_it(llm, expected, fills):
    first = answers(llm, "small"), answers(llm, None), answers(llm, "small")
    assert first == (expected["small"], expected[None], expected["small"])
    assert len(fills) <= 1
    fills.clear()
    loads = llm.stats().num_adapter_loads
    assert answers(llm, "small") == expected["small"]
    assert not fills and llm.stats().num_adapter_loads == loads


def test_adapters_that_take_each_others_blocks_are_put_in_order_again(llm, expected, fills):
    before = llm.stats().num_adapter_loads
    for name in (*NAMES, *NAMES[::-1], "small", "some"):
        assert answers(llm, name) == expected[name]
    assert llm.stats().num_adapter_loads - before > 3, "the pool is to be short of room for all"
    assert len(fills) > 3


def test_an_adapter_in_the_very_blocks_of_another_is_not_taken_for_it(llama, tmp_path):
    """Both change the same matrices by the same ranks, so nothing but what was written tells them apart."""
    twins = {name: save_adapter(llama[0], tmp_path, name, **ADAPTERS["all"]) for name in ("one", "other")}
    with LLM(llama[0], **SETTINGS, lora_modules=twins, kv_cache_memory_bytes=90 * PAGE) as llm:

        def answer(prompt, name):
            return llm.generate(prompt, SHORT, use_tqdm=False, lora_request=name)[0].outputs[0].token_ids

        others = answer(PROMPTS[0], "other")
        assert answer(PROMPTS[1], "one") != answer(PROMPTS[1], "other")
        engine = llm.control.engine
        adapters = {name: llm.input_processor.adapters.find(name) for name in twins}
        blocks = engine.memory.shared["adapters"]._images[adapters["one"].digest]
        assert adapters["one"].site_blocks == adapters["other"].site_blocks
        engine.runner._load(AdapterLoad(adapters["other"], blocks))
        assert answer(PROMPTS[0], "one") == others


@pytest.mark.parametrize("taken", [False, True], ids=["before it began", "after it took the matrices"])
def test_a_fill_that_fails_leaves_no_place_that_seems_to_hold_what_it_does_not(llm, expected, monkeypatch, taken):
    worker, batches = llm.control.engine.runner.worker, []
    adapters, given = worker.adapters, worker.adapters.given
    monkeypatch.setattr(adapters, "given", lambda pool, batch: batches.append(batch) or given(pool, batch))
    assert answers(llm, "all") == expected["all"]
    monkeypatch.undo()
    table = batches[-1].caches[-1].table
    ((place, blocks),) = [item for item in adapters._held.items() if (item[1] == table[item[0]]).all()]
    want = jax.tree.map(lambda leaf: np.asarray(leaf[:, place]), adapters._matrices)

    def failing(key, matrices, pool, blocks, place):
        if taken:
            jax.tree.map(lambda leaf: leaf.delete(), matrices)
        raise MemoryError("as if the device had none left")

    adapters.written(blocks)
    monkeypatch.setattr(adapters, "_fill", failing)
    with pytest.raises(MemoryError):
        adapters.given(worker.pool, batches[-1])
    assert not adapters._held
    monkeypatch.undo()
    adapters.given(worker.pool, batches[-1])
    jax.tree.map(lambda leaf, its: np.testing.assert_array_equal(leaf[:, place], its), adapters._matrices, want)
    assert [answers(llm, name) for name in NAMES] == [expected[name] for name in NAMES]


def test_memory_is_given_back_while_the_engine_sleeps(llm, expected):
    answers(llm, "all")
    worker = llm.control.engine.runner.worker
    leaves = jax.tree.leaves(worker.adapters._matrices)
    llm.release_memory()
    assert leaves and all(leaf.is_deleted() for leaf in leaves)
    llm.resume(use_tqdm=False)
    assert answers(llm, "all") == expected["all"]


def test_a_plan_counts_them_beside_the_pool(llama):
    with LLM(llama[0], **SETTINGS, lora_modules=llama[1], kv_cache_memory_bytes=90 * PAGE) as llm:
        answers(llm, "small")
        held = device_bytes(llm.control.engine.runner.worker.adapters._matrices)
    settings = {key: value for key, value in SETTINGS.items() if key not in ("max_model_len", "max_num_seqs")}
    settings.pop("enforce_eager")
    assert plan(llama[0], "cpu", context=64, concurrency=4, **settings).adapter_bytes == held > 0

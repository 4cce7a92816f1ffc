"""An engine's memory is given back and taken again; what it serves goes on."""

from __future__ import annotations

import asyncio
import gc

import jax
import pytest
from tiny_chat_model import make_chat_model

from jpaged import LLM, AsyncLLM, DraftModel, Layers, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 24}
PROMPTS = [{"prompt_token_ids": list(range(start, start + 40))} for start in (5, 50)]
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("asleep")
    make_chat_model(path)
    return str(path)


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, DRAWN, use_tqdm=False)]


@pytest.fixture(scope="module")
def want(folder):
    with LLM(folder, **SETTINGS) as llm:
        return tokens(llm)


def live_bytes():
    gc.collect()  # the traceback of an error may hold a step's arrays until then
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("weights", [False, "host", True])
@pytest.mark.parametrize("speculative", [None, "layers", "draft"], ids=["no drafts", "first layers", "draft model"])
def test_memory_is_given_back_and_the_same_tokens_come_afterwards(folder, want, weights, speculative):
    drafts = {None: None, "layers": Layers(1, tokens=2), "draft": DraftModel(folder, tokens=2)}[speculative]
    before = live_bytes()
    with LLM(folder, speculative=drafts, **SETTINGS) as llm:
        params = jax.device_get(llm.params)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        pool = llm.control.engine.runner.worker.pool.nbytes
        assert tokens(llm) == want
        awake = live_bytes()
        llm.release_memory(weights)
        freed = pool + (0 if weights is False else size * (1 + (speculative == "draft")))
        assert awake - live_bytes() >= freed - 10_000
        assert llm.is_sleeping
        for call in (lambda: tokens(llm), llm.warmup, lambda: llm.pin_prefix(PROMPTS[0]), lambda: llm.save_state("x")):
            with pytest.raises(RuntimeError, match=r"needs the memory that release_memory\(\) gave back"):
                call()
        if weights:
            with pytest.raises(RuntimeError, match="params are not on the devices"):
                _ = llm.params
        if weights is True:
            with pytest.raises(ValueError, match="params=None, but"):
                llm.restore_memory()
        assert llm.resume(params=params if weights is True else None) == []
        compiled = llm.control.engine.runner.worker.num_compiled
        assert tokens(llm) == want
        assert llm.control.engine.runner.worker.num_compiled == compiled
    assert live_bytes() - before < 10_000


def test_open_streams_and_pins_outlive_a_sleep(folder, want):
    with LLM(folder, preemption_mode="swap", **SETTINGS) as llm:
        pinned = llm.pin_prefix(PROMPTS[0])
        stream = llm.stream(PROMPTS, DRAWN)
        got = [next(stream) for _ in range(9)]
        llm.sleep()
        with pytest.raises(RuntimeError, match="gave back"):
            llm.generate(PROMPTS[0], DRAWN, use_tqdm=False)
        llm.sleep(level=1)  # again is no error
        llm.wake_up(["weights"])
        assert llm.is_sleeping
        llm.wake_up()
        found = [[], []]
        for delta in [*got, *stream]:
            found[delta.prompt_index] += delta.token_ids
        assert found == want
        longer = {"prompt_token_ids": [*PROMPTS[0]["prompt_token_ids"], 3]}
        assert llm.generate(longer, DRAWN, use_tqdm=False)[0].num_cached_tokens == pinned.num_tokens


@pytest.mark.parametrize("again", [1, 2])
def test_weights_that_are_released_twice_come_back_with_those_of_the_draft_model(folder, want, again):
    with LLM(folder, speculative=DraftModel(folder, tokens=2), **SETTINGS) as llm:
        params = jax.device_get(llm.params)
        llm.sleep(1)
        llm.sleep(again)
        llm.wake_up([])
        assert llm.is_sleeping and not llm.control.engine.runner.worker.model.has_params
        if again == 2:
            with pytest.raises(ValueError, match="left no weights"):
                llm.wake_up()
            assert not llm.control.engine.runner.worker.models.drafter.has_params, "a refusal takes no memory"
        llm.restore_memory(params if again == 2 else None)
        assert tokens(llm) == want


def test_an_engine_whose_pool_finds_no_memory_sleeps_on(folder, want, monkeypatch):
    with LLM(folder, **SETTINGS) as llm:
        llm.release_memory()

        def no_room(*args):
            raise MemoryError("the trainer holds it")

        with monkeypatch.context() as patch:
            patch.setattr("jpaged.execution.caches.pool.make_pool", no_room)
            with pytest.raises(MemoryError, match="the trainer holds it"):
                llm.restore_memory()
            assert llm.is_sleeping
            llm.release_memory("host")
            assert not llm.control.engine.runner.worker.model.has_params
        llm.restore_memory()
        assert tokens(llm) == want


def test_vllm_s_second_level_takes_new_weights_before_the_pool(folder, want):
    with LLM(folder, enable_sleep_mode=True, **SETTINGS) as llm:
        params = jax.tree.map(lambda leaf: leaf + 0, llm.params)
        llm.sleep(level=2)
        with pytest.raises(ValueError, match="left no weights"):
            llm.wake_up()
        llm.wake_up(tags=["weights"])
        llm.update_params(params)
        llm.wake_up(tags=["kv_cache"])
        assert tokens(llm) == want
        for call, message in (
            (lambda: llm.sleep(3), "level=3"),
            (lambda: llm.wake_up(["all"]), "tags='all'"),
            (lambda: llm.wake_up("weights"), "tags='weights' must be a list"),
        ):
            with pytest.raises(ValueError, match=message):
                call()


def test_clients_wait_while_an_async_engine_sleeps(folder, want):
    async def serve():
        async with AsyncLLM(folder, **SETTINGS) as llm:

            async def client(number):
                stream = llm.generate(PROMPTS[number], DRAWN, str(number))
                return [output async for output in stream][-1].outputs[0].token_ids

            first = asyncio.create_task(client(0))
            while not llm.stats().num_output_tokens:
                await asyncio.sleep(0.001)
            await llm.sleep(level=1)
            assert await llm.is_sleeping()
            second = asyncio.create_task(client(1))
            await llm.abort("nobody")  # the engine's thread has been awake for it
            assert not first.done() and not second.done()
            await llm.wake_up()
            return [await first, await second]

    assert asyncio.run(serve()) == want

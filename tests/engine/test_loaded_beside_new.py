"""A state is loaded while new requests are on their way: each keeps its own tokens, and none is lost."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from checkpoints import make_checkpoint

from jpaged import LLM, AsyncLLM, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 16}
OLD, NEW = ({"prompt_token_ids": np.random.default_rng(i).integers(3, 211, 20).tolist()} for i in range(2))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
SEVERAL = SamplingParams(temperature=1.0, seed=5, n=6, max_tokens=9, ignore_eos=True, detokenize=False)
"""More outputs than run at once: a request of two parts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, **SETTINGS) as llm:
        return {"old": tokens(llm.generate(OLD, GREEDY)[0]), "new": tokens(llm.generate(NEW, SEVERAL)[0])}


@pytest.fixture
def state(folder, tmp_path):
    """A request in its middle, saved; it has the first ids that an engine gives."""
    with LLM(folder, **SETTINGS) as llm:
        stream = llm.stream(OLD, GREEDY)
        for _ in range(5):
            next(stream)
        llm.save_state(tmp_path)
    return tmp_path


def tokens(output):
    return [one.token_ids for one in output.outputs]


def assert_nothing_is_left(llm):
    engine = llm.control.engine
    assert not engine.has_work and not engine.requests.awaited and not engine.requests.restored
    assert engine.memory.num_used_blocks == 0


def test_a_stream_that_was_made_before_has_ids_of_its_own(folder, expected, state):
    with LLM(folder, **SETTINGS) as llm:
        stream = llm.stream(NEW, SEVERAL)
        assert llm.load_state(state) == ["0"]
        found: dict[int, list[int]] = {}
        names = set()
        for delta in stream:
            found[delta.index] = found.get(delta.index, []) + list(delta.token_ids)
        assert [found[i] for i in sorted(found)] == expected["new"]
        resumed = llm.resume(use_tqdm=False)
        names = {output.request_id for output in resumed}
        assert [tokens(output) for output in resumed] == [expected["old"]] and names == {"0"}
        assert_nothing_is_left(llm)


def test_a_client_whose_prompt_is_being_read_meanwhile_has_ids_of_its_own(folder, expected, state, monkeypatch):
    llm = LLM(folder, **SETTINGS)
    made, loaded = threading.Event(), threading.Event()

    async def main():
        async with AsyncLLM.from_llm(llm) as engine:
            process = engine.input_processor.process

            def slow(*args, **options):
                request = process(*args, **options)
                made.set()
                loaded.wait(60)
                return request

            monkeypatch.setattr(engine.input_processor, "process", slow)

            async def client():
                async for output in engine.generate(NEW, SEVERAL, "0"):
                    last = output
                return tokens(last)

            answer = asyncio.create_task(client())
            await asyncio.to_thread(made.wait, 60)
            assert await engine.load_state(state) == ["0"]
            with pytest.raises(ValueError, match="'0' is running: the restored one waits until it has ended"):
                await anext(engine.resume("0"))
            loaded.set()
            assert await answer == expected["new"]
            async for output in engine.resume("0"):
                last = output
            assert tokens(last) == expected["old"]
            await engine.check_health(60)

    asyncio.run(asyncio.wait_for(main(), 120))
    assert_nothing_is_left(llm)
    llm.close()

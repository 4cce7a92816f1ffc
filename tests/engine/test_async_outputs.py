"""What `AsyncLLM` yields: everything so far, what is new, or the end; and that nobody waits for another's text."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import replace

import pytest
from few_shapes import run_in_few_shapes
from tiny_chat_model import make_chat_model

from jpaged import LLM, AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
SCORED = replace(DRAWN, logprobs=0)
TEXT = "the cab is far"
SECONDS = 60  # nothing may hang


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    llm = LLM(str(folder), **SETTINGS)
    run_in_few_shapes(llm)
    return llm


def serve(llm, client):
    """Return what a coroutine function makes of an AsyncLLM over this LLM."""

    async def main():
        async with AsyncLLM.from_llm(llm) as engine:
            return await asyncio.wait_for(client(engine), SECONDS)

    return asyncio.run(main())


def outputs_of(llm, params, prompt=TEXT):
    async def client(engine):
        return [output async for output in engine.generate(prompt, params, "name")]

    return serve(llm, client)


@pytest.mark.parametrize("more", [{}, {"stop": "no such text"}, {"n": 3, "logprobs": 2}, {"detokenize": False}])
def test_deltas_together_are_what_generate_returns(llm, more):
    params = replace(SCORED, **more)
    (whole,) = llm.generate(TEXT, params, use_tqdm=False)
    deltas = outputs_of(llm, replace(params, output_kind=RequestOutputKind.DELTA))
    assert len(deltas) > 1 and [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    for expected in whole.outputs:
        mine = [output for delta in deltas for output in delta.outputs if output.index == expected.index]
        assert all(output.token_ids or output.finish_reason for output in mine)
        assert "".join(output.text for output in mine) == expected.text
        assert [token for output in mine for token in output.token_ids] == expected.token_ids
        assert mine[-1].finish_reason == expected.finish_reason
        assert mine[-1].cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)
        if params.logprobs:
            found = [set(entry) for output in mine for entry in output.logprobs]
            assert found == [set(entry) for entry in expected.logprobs]


def test_the_final_output_is_the_only_one_when_asked(llm):
    (whole,) = llm.generate(TEXT, replace(DRAWN, stop="a"), use_tqdm=False)
    (output,) = outputs_of(llm, replace(DRAWN, stop="a", output_kind=RequestOutputKind.FINAL_ONLY))
    assert output.finished and output.outputs[0].text == whole.outputs[0].text
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_generate_returns_the_whole_whatever_the_kind(llm, kind):
    (output,) = llm.generate(TEXT, replace(DRAWN, output_kind=kind), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 24


def test_a_kind_is_no_number():
    with pytest.raises(ValueError, match="output_kind=1 must be a RequestOutputKind"):
        SamplingParams(output_kind=1)


def test_beam_search_finds_what_the_offline_engine_finds(llm):
    params = BeamSearchParams(3, 12)
    (expected,) = llm.beam_search(TEXT, params, use_tqdm=False)

    async def client(engine):
        with pytest.raises(TypeError, match="parameters must be SamplingParams, not BeamSearchParams"):
            await anext(engine.generate(TEXT, params, "wrong"))
        with pytest.raises(ValueError, match="beam_width=5 is above max_num_seqs=4"):
            await engine.beam_search(TEXT, BeamSearchParams(5, 12), "wide")
        return await engine.beam_search(TEXT, params, "beams")

    found = serve(llm, client)
    assert found.finished and found.request_id == "beams"
    assert [output.token_ids for output in found.outputs] == [output.token_ids for output in expected.outputs]
    assert [output.text for output in found.outputs] == [output.text for output in expected.outputs]


def test_neither_the_engine_nor_the_event_loop_waits_while_a_prompt_is_tokenised(llm, monkeypatch):
    slow, process = threading.Event(), llm.input_processor.process
    threads = set()

    def processed(prompt, *args, **kwargs):
        threads.add(threading.current_thread())
        if prompt == "slow":
            assert slow.wait(SECONDS)
        return process(prompt, *args, **kwargs)

    monkeypatch.setattr(llm.input_processor, "process", processed)

    async def client(engine):
        waiting = asyncio.create_task(anext(engine.generate("slow", DRAWN, "slow")))
        others = [[o async for o in engine.generate(TEXT, DRAWN, f"r{i}")] for i in range(2)]
        assert not waiting.done()
        slow.set()
        await waiting
        assert "jpaged-engine" not in {thread.name for thread in threads} and threading.main_thread() not in threads
        return [len(outputs[-1].outputs[0].token_ids) for outputs in others]

    assert serve(llm, client) == [24, 24]


def test_an_abort_while_the_prompt_is_tokenised_ends_the_request(llm, monkeypatch):
    process = llm.input_processor.process
    monkeypatch.setattr(llm.input_processor, "process", lambda *a, **k: time.sleep(0.2) or process(*a, **k))

    async def client(engine):
        task = asyncio.create_task(anext(engine.generate(TEXT, DRAWN, "r")))
        await asyncio.sleep(0.05)
        await engine.abort("r")
        return await task

    output = serve(llm, client)
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert llm.control.engine.memory.num_used_blocks == 0 and not llm.control.engine.has_work


def test_a_client_that_leaves_while_its_prompt_is_tokenised_holds_nothing(llm, monkeypatch):
    process = llm.input_processor.process
    monkeypatch.setattr(llm.input_processor, "process", lambda *a, **k: time.sleep(0.2) or process(*a, **k))

    async def client(engine):
        task = asyncio.create_task(anext(engine.generate(TEXT, DRAWN, "r")))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [output async for output in engine.generate(TEXT, DRAWN, "r")]

    assert serve(llm, client)[-1].outputs[0].finish_reason == "length"
    assert llm.control.engine.memory.num_used_blocks == 0 and not llm.control.engine.has_work


def test_prefixes_are_pinned_while_clients_are_served_and_a_pin_that_is_cancelled_holds_nothing(llm):
    prefix = [40] * 20

    async def client(engine):
        with pytest.raises(ValueError, match="the prompt's 3 tokens are fewer than the"):
            await engine.pin_prefix([40] * 3)
        pinned = await engine.pin_prefix(prefix)
        outputs = engine.generate({"prompt_token_ids": [*prefix, 41]}, replace(DRAWN, max_tokens=90), "r")
        first = await anext(outputs)
        second = await engine.pin_prefix([50] * 20, seconds=900, name="mine")
        (_, listed) = await engine.pinned_prefixes()
        assert (listed.seq_id, listed.num_tokens, listed.name) == (second.seq_id, 16, "mine")
        assert 0 < listed.seconds_left <= 900
        await engine.unpin(second)
        for pauses in range(4):  # wherever the call is, nothing of it stays
            task = asyncio.ensure_future(engine.pin_prefix([51 + pauses] * 20))
            for _ in range(pauses):
                await asyncio.sleep(0.002)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await engine.unpin(await task)
        task = asyncio.ensure_future(engine.pin_prefix([60] * 20))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [one.seq_id for one in await engine.pinned_prefixes()] == [pinned.seq_id]
        await outputs.aclose()
        report = await engine.memory_report()
        await engine.unpin(pinned)
        with pytest.raises(ValueError, match="is not pinned"):
            await engine.unpin(pinned)
        return pinned.num_tokens, first.num_cached_tokens, report.groups[0].pinned

    assert serve(llm, client) == (16, 16, 2)
    assert llm.control.engine.memory.num_used_blocks == 0

"""Many clients, one engine: outputs, aborts, bounds, failures and ends of `AsyncLLM`."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from few_shapes import run_in_few_shapes
from thorough import examples
from tiny_chat_model import make_chat_model

from jpaged import (
    LLM,
    AsyncLLM,
    EngineBusy,
    EngineStopped,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from jpaged.engine_args import EngineArgs
from jpaged.outputs import AnswerMessage
from jpaged.text.token_reader import TokenReader

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
LONG = replace(DRAWN, max_tokens=110)
TEXT = "the cab is far"
SECONDS = 30  # nothing may hang


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def warm(folder):
    """Its pool is small: four long requests do not fit at once."""
    page = LLM(folder, **SETTINGS).memory_report().page_bytes
    llm = LLM(folder, kv_cache_memory_bytes=24 * page, cumulative_logprobs=True, **SETTINGS)
    run_in_few_shapes(llm)
    return llm


@pytest.fixture
def llm(warm):
    """The engine; after every test its memory is empty and sound."""
    yield warm
    assert_nothing_is_left(warm)


@pytest.fixture
def slow(llm, monkeypatch):
    """The engine, at 10 ms a step at least, so that nothing ends before its time."""
    dispatch = llm.control.engine.runner.dispatch_all

    def late(steps):
        time.sleep(0.01)
        return dispatch(steps)

    monkeypatch.setattr(llm.control.engine.runner, "dispatch_all", late)
    return llm


def assert_nothing_is_left(llm):
    assert llm.control.engine.memory.num_used_blocks == 0
    assert not llm.control.engine.has_work
    llm.control.engine.memory.check_invariants()


def run(main, seconds=SECONDS):
    return asyncio.run(asyncio.wait_for(main, seconds))


@asynccontextmanager
async def serving(llm, **options):
    async with AsyncLLM.from_llm(llm, **options) as engine:
        yield engine


async def outputs_of(engine, request_id, prompt=TEXT, params=DRAWN):
    return [output async for output in engine.generate(prompt, params, request_id)]


async def used_blocks(engine):
    return sum(group.used for group in (await engine.memory_report()).groups)


# ---------------------------------------------------------------------- outputs


def test_the_last_output_is_what_generate_returns(llm):
    prompts = [TEXT, "abc", {"prompt_token_ids": [9] * 20}, "d" * 40, "ef"]
    params = [replace(DRAWN, seed=i, stop="a" if i % 2 else None) for i in range(5)]
    expected = llm.generate(prompts, params, use_tqdm=False)

    async def main():
        async with serving(llm) as engine:
            calls = (outputs_of(engine, f"r{i}", *pair) for i, pair in enumerate(zip(prompts, params, strict=True)))
            return await asyncio.gather(*calls)

    for i, outputs in enumerate(run(main())):
        last, whole = outputs[-1], expected[i]
        assert last.outputs == [replace(whole.outputs[0], cumulative_logprob=last.outputs[0].cumulative_logprob)]
        assert last.outputs[0].cumulative_logprob == pytest.approx(whole.outputs[0].cumulative_logprob, abs=1e-4)
        assert (last.request_id, last.prompt, last.prompt_token_ids) == (f"r{i}", whole.prompt, whole.prompt_token_ids)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_more_outputs_than_places_come_in_turns(llm):
    params = replace(DRAWN, n=7)
    want = [o.text for o in llm.generate(TEXT, params, use_tqdm=False)[0].outputs]

    async def main():
        async with serving(llm) as engine:
            outputs = await outputs_of(engine, "many", params=params)
            assert [o.text for o in outputs[-1].outputs] == want
            assert not any(output.finished for output in outputs[:-1]) and outputs[-1].finished
            async with aclosing(engine.generate(TEXT, params, "left")) as left:
                await anext(left)
            assert await used_blocks(engine) == 0

    run(main())


def test_outputs_grow_and_nothing_shown_is_taken_back(slow):
    async def main():
        async with serving(slow) as engine:
            return await outputs_of(engine, "r", params=replace(DRAWN, stop="no such text"))

    outputs = [output.outputs[0] for output in run(main())]
    assert len(outputs) > 1
    for before, after in itertools.pairwise(outputs):
        assert after.text.startswith(before.text)
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert len(after.token_ids) > len(before.token_ids)


def test_a_slow_reader_gets_the_newest_output_and_the_last(slow):
    async def main():
        async with serving(slow) as engine:
            outputs = []
            async for output in engine.generate(TEXT, DRAWN, "slow"):
                outputs.append(output)
                await outputs_of(engine, "other")
            return outputs

    outputs = run(main())
    assert len(outputs) == 2, "the second holds all that came meanwhile"
    assert len(outputs[-1].outputs[0].token_ids) == 24


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]

    async def main():
        async with serving(llm) as engine:
            return await outputs_of(engine, "r", engine.chat_prompt(messages))

    assert run(main())[-1].prompt == "<s>user: hi<s>assistant:"


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_chat_ends_with_the_message_of_its_text(llm, kind):
    params = SamplingParams(temperature=0.0, max_tokens=6, output_kind=kind, n=2)

    async def main():
        async with serving(llm) as engine:
            return [one async for one in engine.chat([{"role": "user", "content": "hi"}], params, "r")]

    outputs = run(main())
    texts = {0: "", 1: ""}
    for one in (one for output in outputs for one in output.outputs):
        texts[one.index] = one.text if kind is not RequestOutputKind.DELTA else texts[one.index] + one.text
        assert one.message == (AnswerMessage(texts[one.index]) if one.finished() else None)
    assert outputs[-1].finished and outputs[0].prompt == "<s>user: hi<s>assistant:"


# ---------------------------------------------------------------------- refusals


def test_bad_requests_are_refused_and_harm_no_other(llm):
    async def main():
        async with serving(llm) as engine:
            good = asyncio.create_task(outputs_of(engine, "good"))
            for prompt, message in (
                ({"prompt_token_ids": []}, "0 tokens"),
                ({"prompt_token_ids": [5] * 128}, "max_model_len=128"),
                ({"text": "a"}, "not \\['text'\\]"),
            ):
                with pytest.raises(ValueError, match=message):
                    await outputs_of(engine, "bad", prompt)
            with pytest.raises(TypeError, match="parameters must be SamplingParams, not str"):
                await outputs_of(engine, "bad", params="hot")
            with pytest.raises(ValueError, match="priority='high' must be an integer"):
                await anext(engine.generate(TEXT, None, "bad", priority="high"))
            return await good

    assert run(main())[-1].outputs[0].finish_reason == "length"


def test_a_request_id_is_unique_while_it_runs_and_free_afterwards(slow):
    async def main():
        async with serving(slow) as engine:
            async with aclosing(engine.generate(TEXT, LONG, "same")) as first:
                await anext(first)
                with pytest.raises(ValueError, match="request_id='same' is running already"):
                    await outputs_of(engine, "same")
            return await outputs_of(engine, "same")

    assert run(main())[-1].finished


def test_more_waiting_requests_than_the_bound_are_refused(slow):
    async def main():
        async with serving(slow, max_waiting_requests=3) as engine:
            running = [engine.generate(TEXT, LONG, f"running{i}") for i in range(4)]
            for generator in running:
                await anext(generator)  # admitted, so it does not count as waiting
            waiting = [asyncio.create_task(outputs_of(engine, f"waiting{i}")) for i in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(EngineBusy, match="3 requests are waiting, and max_waiting_requests=3"):
                await outputs_of(engine, "one more")
            waiting.pop().cancel()
            await asyncio.sleep(0)
            await outputs_of(engine, "in its place")
            done = await asyncio.gather(*waiting)
            assert [outputs[-1].outputs[0].finish_reason for outputs in done] == ["length"] * 2
            for generator in running:
                await generator.aclose()

    run(main())


@pytest.mark.parametrize("bound", [0, -1, 1.5, True])
def test_a_wrong_bound_is_named(llm, bound):
    with pytest.raises(ValueError, match=f"max_waiting_requests={bound}"):
        AsyncLLM.from_llm(llm, max_waiting_requests=bound)


# ---------------------------------------------------------------------- going away


def test_an_abort_ends_the_iterator_and_frees_the_blocks_before_it_returns(slow):
    async def main():
        async with serving(slow) as engine:
            generator = engine.generate(TEXT, LONG, "r")
            await anext(generator)
            await engine.abort("r")
            assert await used_blocks(engine) == 0
            rest = [output async for output in generator]
            await engine.abort("r")
            await engine.abort("never seen")
            return rest

    (last,) = run(main())
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert 1 <= len(last.outputs[0].token_ids) < 110


@pytest.mark.parametrize("way", ["close", "cancel", "break"])
def test_a_client_that_goes_away_frees_its_blocks(slow, way):
    async def leave_early(generator):
        async for _ in generator:
            break

    async def main():
        async with serving(slow) as engine:
            if way == "cancel":
                task = asyncio.create_task(outputs_of(engine, "r", params=LONG))
                while not await used_blocks(engine):
                    pass
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif way == "break":
                await leave_early(engine.generate(TEXT, LONG, "r"))
                for _ in range(3):
                    await asyncio.sleep(0)  # asyncio makes a task that closes what was dropped
            else:
                generator = engine.generate(TEXT, LONG, "r")
                await anext(generator)
                assert await used_blocks(engine) > 0
                await generator.aclose()
            assert await used_blocks(engine) == 0

    run(main())


def test_a_client_whose_event_loop_ended_holds_nothing(slow):
    engine = AsyncLLM.from_llm(slow)

    async def leave():
        generator = engine.generate(TEXT, LONG, "r")
        await anext(generator)

    run(leave())
    assert len(run(outputs_of(engine, "r"))) > 1
    run(engine.shutdown())


def test_hundreds_of_random_submits_aborts_and_cancellations_leave_an_empty_pool(llm):
    draw, number_of_requests = random.Random(5), examples(1000)
    ends = {"finished": 0, "abort": 0, "left": 0, "cancelled": 0, "busy": 0, "refused": 0}

    async def client(engine, number):
        try:
            ends[await attempt(engine, number)] += 1
        except asyncio.CancelledError:
            ends["cancelled"] += 1
        except EngineBusy:
            ends["busy"] += 1
            await asyncio.sleep(0.02)
            await client(engine, number)
        except ValueError:
            ends["refused"] += 1

    async def attempt(engine, number):
        prompt = {"prompt_token_ids": [draw.randrange(3, 200)] * draw.choice([1, 7, 8, 20, 60])}
        if draw.random() < 0.03:
            prompt = {"prompt_token_ids": []}
        params = replace(DRAWN, seed=number, max_tokens=draw.randint(1, 30), stop=draw.choice([None, "a", "the"]))
        most = draw.choice([1, 3, 1000])
        async with aclosing(engine.generate(prompt, params, f"r{number}")) as outputs:
            async for output in outputs:
                if output.finished:
                    return "abort" if output.outputs[0].finish_reason == "abort" else "finished"
                if draw.random() < 0.05:
                    await engine.abort(f"r{number}")
                most -= 1
                if most == 0:
                    return "left"
        raise AssertionError("the iterator ended without a finished output")

    async def main():
        async with serving(llm, max_waiting_requests=40) as engine:
            tasks, room = [], asyncio.Semaphore(60)
            for number in range(number_of_requests):
                await room.acquire()
                tasks.append(asyncio.create_task(client(engine, number)))
                tasks[-1].add_done_callback(lambda _: room.release())
                if draw.random() < 0.2:
                    draw.choice(tasks[-60:]).cancel()
                if draw.random() < 0.3:
                    await engine.abort(f"r{draw.randrange(max(0, number - 60), number + 1)}")
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
            assert await used_blocks(engine) == 0

    run(main(), seconds=120)
    counted = sum(ends.values()) - ends["busy"]
    assert counted > 0.8 * number_of_requests, "a task cancelled before it began counts nowhere"
    assert all(count > 0.01 * number_of_requests for count in ends.values()), ends


# ---------------------------------------------------------------------- the end of the engine


def test_shutdown_ends_running_iterators_with_an_error_and_frees_everything(slow):
    async def main():
        engine = AsyncLLM.from_llm(slow)
        tasks = [asyncio.create_task(outputs_of(engine, f"r{i}", params=LONG)) for i in range(6)]
        while not await used_blocks(engine):
            pass
        await engine.shutdown()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineStopped] * 6
        assert "shut down" in str(results[0])
        for late in (outputs_of(engine, "late"), engine.abort("r0"), engine.memory_report()):
            with pytest.raises(EngineStopped, match="shut down"):
                await late
        await engine.shutdown()
        assert not engine._thread._thread.is_alive()

    run(main())


def test_while_it_serves_the_llm_refuses_to_be_used_and_works_again_afterwards(llm):
    async def main():
        async with serving(llm):
            with pytest.raises(RuntimeError, match="in use by an AsyncLLM"):
                llm.generate(TEXT, DRAWN, use_tqdm=False)
            with pytest.raises(RuntimeError, match="in use by an AsyncLLM"):
                AsyncLLM.from_llm(llm)

    run(main())
    assert len(llm.generate(TEXT, DRAWN, use_tqdm=False)[0].outputs[0].token_ids) == 24
    stream = llm.stream(TEXT, DRAWN)
    next(stream)
    with pytest.raises(RuntimeError, match="while requests run"):
        AsyncLLM.from_llm(llm)
    stream.close()


def test_an_llm_whose_async_llm_could_not_be_made_works_on(llm, monkeypatch):
    def refusing(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
        patch.setattr("jpaged.engine.thread.threading.Thread.start", refusing)
        AsyncLLM.from_llm(llm)
    assert len(llm.generate(TEXT, DRAWN, use_tqdm=False)[0].outputs[0].token_ids) == 24
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
        patch.setattr("jpaged.engine.control.EngineControl.through", refusing)
        AsyncLLM.from_llm(llm)
    assert len(llm.generate(TEXT, DRAWN, use_tqdm=False)[0].outputs[0].token_ids) == 24


def test_a_failure_of_the_loop_reaches_every_client_and_later_callers(folder):
    async def main():
        engine = AsyncLLM(folder, kv_cache_memory_bytes=1 << 20, **SETTINGS)
        runner = engine.control.engine.runner
        dispatch, count = runner.dispatch_all, itertools.count()

        def failing(steps):
            if next(count) == 5:
                raise MemoryError("the device is full")
            return dispatch(steps)

        runner.dispatch_all = failing
        tasks = [asyncio.create_task(outputs_of(engine, f"r{i}", params=LONG)) for i in range(6)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineStopped] * 6
        assert all(isinstance(result.__cause__, MemoryError) for result in results)
        for late in (outputs_of(engine, "late"), engine.abort("r0")):
            with pytest.raises(EngineStopped, match="the device is full"):
                await late
        await engine.shutdown()

    run(main())


def test_a_call_is_answered_though_the_news_after_it_cannot_be_read(folder, monkeypatch):
    """The clients' news are read after a call and before its caller hears of it; an error there stops the engine."""

    async def main():
        engine = AsyncLLM(folder, kv_cache_memory_bytes=1 << 20, **SETTINGS)
        read = TokenReader.read
        reported = threading.Event()

        def report():
            reported.set()
            return "a report"

        def news(reader):
            if reported.is_set():
                raise MemoryError("no room for news")
            return read(reader)

        monkeypatch.setattr(engine.control, "prepare_report", lambda **_: report)
        monkeypatch.setattr(TokenReader, "read", news)
        stream = engine.generate(TEXT, LONG, "one")
        await anext(stream)
        with pytest.raises(MemoryError, match="no room for news"):
            await engine.memory_report()
        with pytest.raises(EngineStopped, match="no room for news"):
            async for _ in stream:
                pass
        await engine.shutdown()

    run(main())


def test_statistics_and_health_are_told_while_it_runs_and_after(llm):
    async def main():
        async with serving(llm) as engine:
            await engine.check_health()
            before = engine.stats()
            async for _ in engine.generate(TEXT, DRAWN, "one"):
                running = engine.stats().num_running
                assert running <= 1
            after = engine.stats()
            assert after.num_output_tokens - before.num_output_tokens == 24
            assert after.finished["length"] - before.finished.get("length", 0) == 1
            assert "jpaged:generation_tokens" in [metric.name for metric in engine.get_metrics()]
            assert await engine.get_tokenizer() is llm.get_tokenizer()
        with pytest.raises(EngineStopped, match="the engine was shut down"):
            await engine.check_health()
        llm.check_health()

    run(main())


def test_a_wrong_argument_raises_in_its_caller_and_the_engine_goes_on(llm, tmp_path):
    calls = (
        (lambda engine: engine.memory_report(replica=9), ValueError, "replica=9 is not one of the 1 replicas"),
        (lambda engine: engine.memory_report(peak="yes"), ValueError, "peak='yes' must be True or False"),
        (lambda engine: engine.memory_map(replica=-1), ValueError, "replica=-1 is not one of the 1 replicas"),
        (lambda engine: engine.release_memory("disk"), ValueError, "weights='disk' is not False, 'host' or True"),
        (lambda engine: engine.sleep(3), ValueError, "level=3 is not 1 or 2"),
        (lambda engine: engine.wake_up(["all"]), ValueError, "tags='all'"),
        (lambda engine: engine.update_params({}, running="go on"), ValueError, "running='go on'"),
        (lambda engine: engine.unpin(7), TypeError, r"unpin\(\) takes what pin_prefix\(\) returned, not 7"),
        (lambda engine: engine.pin_prefix({"prompt_token_ids": []}), ValueError, "the prompt has 0 tokens"),
        (lambda engine: engine.load_state(tmp_path), ValueError, "has no saved state"),
    )

    async def client(engine):
        for call, kind, message in calls:
            with pytest.raises(kind, match=message):
                await call(engine)
            await engine.check_health(SECONDS)
        with pytest.raises(TypeError):
            engine.save_every(7, 1.0)
        assert (await engine.memory_report(peak=True)).page_bytes == (await engine.memory_report()).page_bytes
        return [output async for output in engine.generate(TEXT, DRAWN, "after")][-1].outputs[0].token_ids

    async def main():
        async with serving(llm) as engine:
            return await client(engine)

    assert len(run(main())) == 24


def test_shutting_down_frees_the_memory_of_an_engine_of_its_own(folder):
    async def main():
        engine = AsyncLLM(folder, **SETTINGS)
        pool = engine.control.engine.runner.worker.pool
        await engine.shutdown()
        assert pool.is_deleted()
        await engine.shutdown()

    run(main())


# ---------------------------------------------------------------------- what a server asks of it


def test_an_engine_has_ended_when_it_is_shut_down_and_not_before(llm):
    async def main():
        async with serving(llm) as engine:
            assert (engine.max_model_len, engine.vocab_size) == (128, llm.vocab_size) and engine.config is llm.config
            ended = asyncio.create_task(engine.ended())
            await engine.check_health(timeout=5)
            assert not ended.done()
        await ended

    run(main())


def test_an_engine_that_comes_to_no_end_of_a_step_is_not_healthy(llm, monkeypatch):
    runner = llm.control.engine.runner
    dispatch = runner.dispatch_all

    def stuck(steps):
        time.sleep(0.5)
        return dispatch(steps)

    async def main():
        async with serving(llm) as engine:
            monkeypatch.setattr(runner, "dispatch_all", stuck)
            task = asyncio.create_task(outputs_of(engine, "r"))
            await asyncio.sleep(0.2)
            with pytest.raises(TimeoutError):
                await engine.check_health(timeout=0.05)
            monkeypatch.setattr(runner, "dispatch_all", dispatch)
            await task
            await engine.check_health(timeout=5)

    run(main())


def test_slow_grammars_leave_the_threads_of_plain_requests_alone(llm, monkeypatch):
    go_on = threading.Event()
    process, names = llm.input_processor.process, []

    def slow(prompt, params, *rest, **options):
        if params.structured_outputs is not None:
            names.append(threading.current_thread().name)
            go_on.wait(SECONDS)
            raise ValueError("no grammar")
        return process(prompt, params, *rest, **options)

    async def main():
        async with serving(llm) as engine:
            shaped = replace(DRAWN, structured_outputs=StructuredOutputsParams(regex="a*"))
            waiting = [asyncio.ensure_future(last(engine, shaped, f"shaped-{i}")) for i in range(64)]
            await asyncio.sleep(0)
            plain = await last(engine, DRAWN, "plain")
            assert plain.finished and not any(task.done() for task in waiting) and len(names) == 2
            go_on.set()
            refused = await asyncio.gather(*waiting, return_exceptions=True)
            assert {str(error) for error in refused} == {"no grammar"} and len(set(names)) == 2

    async def last(engine, params, request_id):
        return [output async for output in engine.generate(TEXT, params, request_id)][-1]

    monkeypatch.setattr(llm.input_processor, "process", slow)
    run(main())


# ---------------------------------------------------------------- vLLM's forms of the same


def test_the_prefix_cache_is_reset_between_requests_and_not_among_them(llm):
    async def main():
        async with serving(llm) as engine:
            prompt = TEXT + " and the dog is near the old red house"
            await outputs_of(engine, "a", prompt)
            again = await outputs_of(engine, "b", prompt)
            assert await engine.reset_prefix_cache()
            fresh = await outputs_of(engine, "c", prompt)
            assert again[-1].num_cached_tokens > 0 and fresh[-1].num_cached_tokens == 0
            async with aclosing(engine.generate(prompt, LONG, "d")) as outputs:
                await anext(outputs)
                assert not await engine.reset_prefix_cache(reset_running_requests=False)
            with pytest.raises(TypeError, match="requests end first"):
                await engine.reset_prefix_cache(reset_running_requests=True)

    run(main())


def test_several_requests_are_aborted_together(llm):
    async def main():
        async with serving(llm) as engine:
            tasks = [asyncio.ensure_future(outputs_of(engine, name, params=LONG)) for name in ("a", "b", "c")]
            await asyncio.sleep(0)
            await engine.abort(["a", "b"])
            ended = [outputs[-1].outputs[0].finish_reason for outputs in await asyncio.gather(*tasks)]
            assert ended == ["abort", "abort", "length"]

    run(main())


def test_an_engine_is_made_of_engine_args(folder):
    async def main():
        args = EngineArgs(folder, enforce_eager=True, enable_log_requests=False, **SETTINGS)
        async with AsyncLLM.from_engine_args(args, start_engine_loop=True) as engine:
            assert engine.config.max_model_len == 128

    run(main())

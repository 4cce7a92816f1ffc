"""One engine and several threads, processes, or copies."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import warnings

import numpy as np
import pytest
from greedy_reference import random_prompts
from tiny_chat_model import make_chat_model

from jpaged import LLM, AsyncLLM, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": p} for p in random_prompts(lengths=(5, 9, 17, 20))]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    return LLM(str(folder), **SETTINGS)


def generated(llm, prompt):
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def streamed(llm, prompt):
    return [token for delta in llm.stream(prompt, GREEDY) for token in delta.token_ids]


def test_threads_take_turns_and_mix_no_token(llm):
    expected = [generated(llm, prompt) for prompt in PROMPTS]
    found, start = {}, threading.Barrier(8)

    def ask(number, how):
        start.wait()
        found[number, how] = [how(llm, PROMPTS[number]) for _ in range(3)]

    threads = [threading.Thread(target=ask, args=(i, how)) for i in range(4) for how in (generated, streamed)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {(i, how): [expected[i]] * 3 for i in range(4) for how in (generated, streamed)}
    assert not llm.control.engine.has_work and llm.control.engine.memory.num_used_blocks == 0
    llm.control.engine.memory.check_invariants()


def test_a_call_waits_for_the_one_of_another_thread(llm):
    llm.control.engine.lock.acquire()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (generated(llm, PROMPTS[0]), done.set()))
    thread.start()
    assert not done.wait(0.3)
    llm.control.engine.lock.release()
    assert done.wait(60)
    thread.join()


def test_a_stream_closed_in_a_thread_that_the_turn_waits_for_is_dropped_later(llm):
    expected = generated(llm, PROMPTS[1])
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with llm.control.engine.lock:
        thread = threading.Thread(target=stream.close)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert generated(llm, PROMPTS[1]) == expected
    assert not llm.control.engine.has_work and llm.control.engine.memory.num_used_blocks == 0


def test_a_stream_that_the_collector_closes_in_the_middle_of_a_step_is_dropped_after_it(llm, monkeypatch):
    expected = generated(llm, PROMPTS[1])
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    dispatch = llm.control.engine.runner.dispatch_all

    def collecting(steps):
        stream.close()
        return dispatch(steps)

    monkeypatch.setattr(llm.control.engine.runner, "dispatch_all", collecting)
    assert generated(llm, PROMPTS[1]) == expected
    assert not llm.control.engine.has_work and llm.control.engine.memory.num_used_blocks == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("call", ["generate", "stream", "params", "pin_prefix", "warmup", "update_params"])
def test_a_fork_is_refused_at_its_first_call(llm, call):
    calls = {
        "generate": lambda: generated(llm, PROMPTS[0]),
        "stream": lambda: streamed(llm, PROMPTS[0]),
        "params": lambda: llm.params,
        "pin_prefix": lambda: llm.pin_prefix(PROMPTS[2]),
        "warmup": llm.warmup,
        "update_params": lambda: llm.update_params({"weight": np.zeros(3, np.float32)}),
    }
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of forks
        child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs ends
        try:
            calls[call]()
            os.write(writer, b"it answered")
        except BaseException as error:
            os.write(writer, repr(error).encode())
        os._exit(0)
    os.close(writer)
    told = os.read(reader, 2000).decode()
    os.waitpid(child, 0)
    os.close(reader)
    assert told.startswith("RuntimeError")
    assert f"loaded in process {os.getpid()}" in told and "'spawn'" in told


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_says_what_to_do(llm, make):
    with pytest.raises(TypeError, match=r"LLM cannot be pickled or copied.* call LLM\(\.\.\.\) where it is needed"):
        make(llm)


def test_pickling_an_async_llm_says_the_same(llm):
    with pytest.raises(TypeError, match="AsyncLLM cannot be pickled"):
        pickle.dumps(AsyncLLM.__new__(AsyncLLM))


def test_a_stream_that_begins_once_the_engine_is_lent_is_refused_and_works_when_it_is_back(llm):
    deltas, late = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[0], GREEDY)
    engine = llm.lend_engine()
    with pytest.raises(RuntimeError, match="in use by an AsyncLLM"):
        next(deltas)
    assert not engine.requests.awaited and not engine.has_work
    llm.take_back(engine)
    assert [token for delta in late for token in delta.token_ids] == generated(llm, PROMPTS[0])


def test_a_call_that_waited_while_the_engine_was_lent_is_refused(llm):
    refused = threading.Event()

    def ask():
        with pytest.raises(RuntimeError, match="in use by an AsyncLLM"):
            generated(llm, PROMPTS[0])
        refused.set()

    thread = threading.Thread(target=ask)
    with llm.control.engine.lock:
        thread.start()
        refused.wait(0.2)
        engine = llm.lend_engine()
    thread.join(60)
    llm.take_back(engine)
    assert refused.is_set() and not engine.requests.awaited


def test_a_stream_that_is_dropped_while_the_engine_is_lent_leaves_it_to_whoever_has_it(llm):
    deltas = llm.stream(PROMPTS[0], GREEDY)
    while not next(deltas).finish_reason:
        pass
    engine = llm.lend_engine()
    deltas.close()
    assert engine.recovery.late_aborts and engine.requests.awaited
    llm.take_back(engine)
    assert not engine.has_work and not engine.requests.awaited


def test_a_batch_ends_though_a_handlers_own_call_has_taken_its_ends(llm, monkeypatch):
    """What comes in the wait for the device, as a signal's handler may, steps the engine too."""
    expected = [generated(llm, prompt) for prompt in PROMPTS[:2]]
    worker, step = llm.control.engine.runner.worker, llm.control.engine.step
    fetch, fetches, steps, inner = worker.fetch, [], [], []

    def fetched(arrays):
        fetches.append(arrays)
        if len(fetches) == 3:
            inner.append(generated(llm, PROMPTS[1]))
        return fetch(arrays)

    def counted():
        steps.append(1)
        assert len(steps) < 200, "the batch waits for requests that have ended"
        return step()

    monkeypatch.setattr(worker, "fetch", fetched)
    monkeypatch.setattr(llm.control.engine, "step", counted)
    assert generated(llm, PROMPTS[0]) == expected[0] and inner == [expected[1]]
    assert not llm.control.engine.has_work and not llm.control.engine.requests.awaited

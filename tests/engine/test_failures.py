"""An exception at any moment: what it comes in ends, everything else goes on, and no token is wrong afterwards."""

from __future__ import annotations

import random
import signal
import time

import pytest
from greedy_reference import random_prompts
from tiny_chat_model import make_chat_model

from jpaged import LLM, BeamSearchParams, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 6, "max_model_len": 64, "max_num_batched_tokens": 16}
PROMPTS = [{"prompt_token_ids": p} for p in sorted(random_prompts(lengths=(40, 22, 20, 17, 9)), key=len, reverse=True)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, prompt_logprobs=1, logprobs=1),
    SamplingParams(temperature=1.0, seed=1, max_tokens=16, ignore_eos=True, n=2),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=2, max_tokens=16, presence_penalty=0.5, stop=["never said"]),
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
]
BEAMS = BeamSearchParams(3, 8)
STREAMED = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, stop="never said")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def shared(folder):
    """An engine whose pool is small enough for swaps and block copies, and what it answers when nothing happens."""
    page = LLM(folder, **SETTINGS).memory_report().page_bytes
    llm = LLM(folder, kv_cache_memory_bytes=13 * page, preemption_mode="swap", **SETTINGS)
    return llm, (answers(llm), beams(llm), streamed(llm.stream("the cab", STREAMED)))


@pytest.fixture
def llm(shared):
    """The engine; afterwards it holds nothing, all counts are right, and its answers are those of a fresh one."""
    llm, expected = shared
    yield llm
    assert_nothing_is_left(llm)
    assert (answers(llm), beams(llm), streamed(llm.stream("the cab", STREAMED))) == expected
    assert_nothing_is_left(llm)


def answers(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert len(outputs[0].prompt_logprobs) == 40 and len(outputs[0].outputs[0].logprobs) == 10
    return [[(o.token_ids, o.text, o.finish_reason) for o in output.outputs] for output in outputs]


def beams(llm):
    return [o.token_ids for o in llm.beam_search(PROMPTS[1], BEAMS, use_tqdm=False)[0].outputs]


def streamed(deltas):
    deltas = list(deltas)
    return [t for delta in deltas for t in delta.token_ids], "".join(d.text for d in deltas), deltas[-1].finish_reason


def assert_nothing_is_left(llm):
    engine = llm.control.engine
    assert not engine.has_work and not engine.requests.unfinished and not engine.requests._homes
    assert engine.memory.num_used_blocks == 0
    engine.memory.check_invariants()
    (replica,) = engine.replicas
    assert not replica.in_flight and replica.load == 0
    assert sorted(engine.scheduler.allocation.free_rows) == list(range(SETTINGS["max_num_seqs"]))


@pytest.fixture
def alarm():
    """`alarm(seconds)` sends SIGINT, as Ctrl-C does, so much later."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_ctrl_c_at_fifty_moments_of_a_batch_changes_no_later_token(llm, alarm):
    start = time.perf_counter()
    expected = answers(llm)
    seconds = time.perf_counter() - start
    moments, came = random.Random(0), 0
    for number in range(50):
        try:
            alarm(max(1e-4, moments.uniform(0, 0.5 * seconds)))
            answers(llm)
            alarm(0)
        except KeyboardInterrupt:
            came += 1
        assert_nothing_is_left(llm)
        if number % 10 == 0:
            assert answers(llm) == expected
    assert came > 15


def test_ctrl_c_before_the_first_step_ran_leaves_nothing_in_the_prefix_cache(llm, monkeypatch):
    llm.reset_prefix_cache()
    dispatch = llm.control.engine.runner.dispatch_all

    def interrupted(steps):
        signal.raise_signal(signal.SIGINT)
        raise MemoryError("as if the device call had failed before it did anything")

    monkeypatch.setattr(llm.control.engine.runner, "dispatch_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answers(llm)
    monkeypatch.setattr(llm.control.engine.runner, "dispatch_all", dispatch)
    (again,) = llm.generate(PROMPTS[4], PARAMS[4], use_tqdm=False)
    assert again.num_cached_tokens == 0


def test_ctrl_c_while_the_prefix_cache_is_reset_comes_once_it_is_empty(llm, monkeypatch):
    llm.generate(PROMPTS[4], PARAMS[4], use_tqdm=False)
    cache = llm.control.engine.memory.parts.cache
    forget = cache.forget

    def interrupted(g, block):
        signal.raise_signal(signal.SIGINT)
        forget(g, block)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cache, "forget", interrupted)
        llm.reset_prefix_cache()
    assert_nothing_is_left(llm)
    (again,) = llm.generate(PROMPTS[4], PARAMS[4], use_tqdm=False)
    assert again.num_cached_tokens == 0


class Failing:
    """The n-th call of a method of the worker, or of a kind of its work on the pool, fails, before or after it did its
    work."""

    def __init__(self, monkeypatch, worker, name, number, *, after):
        self.calls, self.raised = 0, False
        owner, method = (worker.works[name], "run") if name in worker.works else (worker, name)
        real = getattr(owner, method)

        def call(*args):
            self.calls += 1
            fails = self.calls == number
            if fails and not after:
                self.raised = True
                raise RuntimeError(f"{name} failed")
            result = real(*args)
            if fails:
                self.raised = True
                if name == "compute" or owner is not worker:
                    worker.pool.delete()  # it was donated, and nobody took the result
                raise RuntimeError(f"{name} failed")
            return result

        monkeypatch.setattr(owner, method, call)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("name", "number"),
    [("swap_out", 1), ("swap_in", 1), ("copies", 1), ("compute", 3), ("score", 2), ("draw", 4), ("fetch", 3)],
)
def test_a_device_call_that_fails_ends_the_batch_it_comes_in_and_no_stream(
    shared, llm, monkeypatch, name, number, after
):
    with monkeypatch.context() as patch:
        deltas = llm.stream("the cab", STREAMED)
        first = next(deltas)
        failing = Failing(patch, llm.control.engine.runner.worker, name, number, after=after)
        with pytest.raises(RuntimeError, match=f"{name} failed"):
            answers(llm)
        assert failing.raised
        assert streamed([first, *deltas]) == shared[1][2]


def test_a_beam_search_goes_on_after_another_call_failed(shared, llm, monkeypatch):
    engine, inputs = llm.control.engine, llm.input_processor
    request = inputs.process(PROMPTS[1], BEAMS)
    engine.add(request)
    for _ in range(9):
        engine.step()
    with monkeypatch.context() as patch:
        Failing(patch, engine.runner.worker, "compute", 1, after=True)
        with pytest.raises(RuntimeError, match="compute failed"):
            answers(llm)
    while engine.has_work:
        engine.step()
    assert [seq.output_token_ids for seq in request.sequences] == shared[1][1]


def test_an_interrupted_wait_loses_neither_of_the_two_steps_in_flight(shared, llm, monkeypatch):
    worker = llm.control.engine.runner.worker
    deltas = llm.stream("the cab", STREAMED)
    first = next(deltas)
    fetch, calls = worker.fetch, []

    def interrupted(arrays):
        calls.append(arrays)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fetch(arrays)

    monkeypatch.setattr(worker, "fetch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answers(llm)
    assert len(llm.control.engine.replicas[0].in_flight) == 2
    assert streamed([first, *deltas]) == shared[1][2]


def test_a_pool_that_was_lost_is_replaced_and_a_pinned_prefix_computed_again(llm, monkeypatch):
    pinned = llm.pin_prefix(PROMPTS[1])
    assert llm.memory_report().groups[0].pinned == 2
    expected = llm.generate(PROMPTS[2:3], PARAMS[2], use_tqdm=False)[0].outputs[0].token_ids
    with monkeypatch.context() as patch:
        Failing(patch, llm.control.engine.runner.worker, "compute", 2, after=True)
        with pytest.raises(RuntimeError, match="compute failed"):
            llm.generate(PROMPTS[2:3], PARAMS[2], use_tqdm=False)
    assert llm.generate(PROMPTS[2:3], PARAMS[2], use_tqdm=False)[0].outputs[0].token_ids == expected
    assert llm.memory_report().groups[0].pinned == 2
    assert not llm.reset_prefix_cache()
    llm.unpin(pinned)
    assert llm.memory_report().groups[0].pinned == 0


def test_a_device_that_cannot_begin_anew_is_asked_again_by_the_next_step(llm, monkeypatch):
    worker = llm.control.engine.runner.worker
    with monkeypatch.context() as patch:
        Failing(patch, worker, "compute", 1, after=True)
        Failing(patch, worker, "restart", 1, after=False)
        with pytest.raises(RuntimeError, match="compute failed"):
            answers(llm)
    answers(llm)


def test_two_interrupts_leave_no_more_than_one(llm, alarm):
    before = signal.getsignal(signal.SIGINT)
    for moment in (1e-3, 2e-2):
        with pytest.raises(KeyboardInterrupt):
            alarm(moment)  # in here: it may come before the next line
            for _ in range(50):
                answers(llm)
    assert signal.getsignal(signal.SIGINT) == before

"""Blocks in host memory change no token: engines whose pool loses what it cached, against one that holds it all."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from checkpoints import make_checkpoint
from test_disk_cache import PARAMS, PROMPTS, SETTINGS, answers
from tiny_chat_model import make_chat_model

from jpaged import LLM

PAGES = 22
"""Large pages of a pool of full attention: two of the prompts fit, four do not."""


def ram_engine(folder, pool, **options):
    options = {"kv_offloading_size": 1 / 64, "kv_offloading_break_even": 1} | options
    return LLM(str(folder), kv_cache_memory_bytes=pool, **(SETTINGS | options))


def check_empty(llm):
    engine = llm.control.engine
    assert not engine.has_work and engine.memory.num_used_blocks == 0
    assert not engine.memory.tiers.prefetch.requests, "something is read for no request"
    engine.memory.check_invariants()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    roomy = LLM(str(folder), **SETTINGS)
    pool = PAGES * roomy.memory_report().page_bytes
    return SimpleNamespace(folder=str(folder), answers=answers(roomy), pool=pool)


@pytest.fixture(scope="module")
def shared(model):
    return ram_engine(model.folder, model.pool, preemption_mode="swap")


@pytest.fixture
def llm(shared):
    """An engine with a small pool and host memory; afterwards it holds nothing, and its counts are right."""
    shared.reset_prefix_cache()
    yield shared
    check_empty(shared)


def test_what_the_pool_lost_is_loaded_with_the_same_tokens_and_counted(model, llm):
    assert answers(llm) == model.answers
    before = llm.stats()
    assert answers(llm) == model.answers
    after = llm.stats()
    assert after.ram.hits - before.ram.hits >= 3 * 56 and after.ram.failures == 0 and after.ram.skipped == 0
    assert after.num_computed_tokens - before.num_computed_tokens < sum(map(len, PROMPTS)) / 2
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert metrics["jpaged:ram_cache_hits"].value == after.ram.hits and metrics["jpaged:ram_open"].value == 1


def test_all_prompts_at_once_are_swapped_and_find_theirs(model, llm):
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for _ in range(2):
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == model.answers
    ram = llm.control.engine.memory.tiers.each[0]
    assert ram.index.num_pages * ram.index.page_bytes == llm.stats().ram.limit_bytes, "no swapped block counts any more"


def test_a_request_that_is_aborted_while_its_blocks_are_loaded_leaves_nothing(model, llm):
    answers(llm)
    gate = threading.Event()
    llm.control.engine.memory.tiers.each[0].store._thread.submit(gate.wait)
    try:
        request = llm.input_processor.process({"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
        llm.control.engine.add(request)
        assert llm.control.engine.memory.tiers.prefetch.waits_for(request.request_id, 0.0) is not None
        llm.control.engine.step()
        llm.control.engine.abort(request)
        check_empty(llm)
    finally:
        gate.set()
    assert answers(llm) == model.answers


@pytest.mark.parametrize("name", ["to_tiers", "from_tiers"])
def test_a_device_call_that_fails_erases_nothing_and_changes_no_token(model, llm, monkeypatch, name):
    work, calls = llm.control.engine.runner.worker.works[name], []
    real = work.run

    def fails(*args):
        filled = real(*args)
        calls.append(name)
        if len(calls) == 2:
            raise RuntimeError(f"{name} failed")
        return filled

    monkeypatch.setattr(work, "run", fails)
    with pytest.raises(RuntimeError, match=f"{name} failed"):
        answers(llm)
        answers(llm)
    check_empty(llm)
    before = llm.stats().ram
    assert before.num_blocks > 0
    assert answers(llm) == model.answers
    assert llm.stats().ram.hits > before.hits and llm.stats().ram.failures == before.failures


def test_released_memory_is_filled_again_from_host_memory(model, llm):
    answers(llm)
    before = llm.stats().ram
    llm.release_memory()
    llm.restore_memory()
    assert answers(llm) == model.answers
    assert llm.stats().ram.hits - before.hits >= 4 * 48


def test_a_saved_state_is_loaded_into_an_engine_with_host_memory(model, llm, tmp_path):
    answers(llm)
    llm.save_state(tmp_path / "state")
    answers(llm, [3])
    other = ram_engine(model.folder, model.pool, preemption_mode="swap")
    other.load_state(tmp_path / "state")
    assert answers(other) == model.answers and answers(other) == model.answers
    check_empty(other)
    other.close()


def test_new_weights_find_nothing_of_the_old_ones(model, llm):
    answers(llm)
    before = llm.stats().ram.hits
    with llm.control.engine.lock:
        llm.control.engine.memory.new_generation()  # which is how weights are replaced
    assert answers(llm) == model.answers and llm.stats().ram.hits == before
    assert answers(llm) == model.answers and llm.stats().ram.hits > before


def test_host_memory_without_room_for_a_large_page_is_refused(model):
    with pytest.raises(ValueError, match="kv_offloading_size=1e-09 GiB, 1 bytes, holds no large page of"):
        ram_engine(model.folder, model.pool, kv_offloading_size=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "seed", "pages", "options"),
    [("gemma2", 0, 20, {}), ("jamba", 1, 20, {"state_checkpoint_interval": 16})],
)
def test_windows_and_states_are_loaded_too(name, seed, pages, options, tmp_path):
    make_checkpoint(name, tmp_path, seed)
    roomy = LLM(str(tmp_path), **SETTINGS | options)
    expected, page = answers(roomy), roomy.memory_report().page_bytes
    llm = ram_engine(tmp_path, pages * page, **options)
    assert answers(llm) == expected and answers(llm) == expected
    assert llm.stats().ram.hits > 0 and llm.stats().ram.failures == 0
    check_empty(llm)

"""A disk changes no token: engines whose pool loses what it cached, against one that holds it all."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import make_checkpoint
from greedy_reference import random_prompts
from on_devices import run_on_devices
from tiny_chat_model import make_chat_model

from jpaged import LLM, SamplingParams

HERE = Path(__file__).parent
SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 24}
PROMPTS = random_prompts(lengths=(65, 58, 70, 61))
PARAMS = [
    SamplingParams(temperature=temperature, seed=5 + i, max_tokens=8, ignore_eos=True, logprobs=1)
    for i, temperature in enumerate((0.0, 1.0, 0.0, 0.8))
]
PAGES = 22
"""Large pages of a pool of full attention: two of the prompts fit, four do not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    roomy = LLM(str(folder), **SETTINGS)
    page = roomy.memory_report().page_bytes
    return SimpleNamespace(folder=str(folder), answers=answers(roomy), pool=PAGES * page, roomy=roomy)


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    return disk_engine(model.folder, tmp_path_factory.mktemp("disk"), model.pool)


@pytest.fixture
def llm(shared):
    """An engine with a small pool and a disk; afterwards it holds nothing, and its counts are right."""
    shared.reset_prefix_cache()
    yield shared
    check_empty(shared)


def disk_engine(folder, disk, pool, **options):
    options = {"disk_folder": str(disk), "disk_space": 1 / 32, "disk_break_even": 1} | options
    return LLM(str(folder), kv_cache_memory_bytes=pool, **(SETTINGS | options))


def answers(llm, which=(0, 1, 2, 3)):
    """Tokens of some prompts, one at a time."""
    found = []
    for i in which:
        (output,) = llm.generate({"prompt_token_ids": PROMPTS[i]}, PARAMS[i], use_tqdm=False)
        found.append(output.outputs[0].token_ids)
    return found


@contextmanager
def hanging(llm):
    """The disk does nothing meanwhile."""
    gate = threading.Event()
    llm.control.engine.memory.tiers.each[0].store._thread.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def check_empty(llm):
    engine = llm.control.engine
    assert not engine.has_work and engine.memory.num_used_blocks == 0
    assert not engine.memory.tiers.prefetch.requests, "something is read for no request"
    engine.memory.check_invariants()


def test_what_the_pool_lost_comes_back_from_disk_with_the_same_tokens(model, llm):
    before = llm.stats().disk
    assert answers(llm) == model.answers
    computed = llm.stats().num_computed_tokens
    assert answers(llm) == model.answers
    disk = llm.stats().disk
    assert disk.hits - before.hits >= 2 * 56, "two prompts at least were lost"
    assert llm.stats().num_computed_tokens - computed < sum(map(len, PROMPTS)) / 2
    assert disk.failures == before.failures and disk.read_bytes > before.read_bytes
    assert 0 < disk.used_bytes <= disk.limit_bytes <= 1 << 25


def test_all_prompts_at_once_and_preempted_find_theirs(model, llm):
    assert answers(llm) == model.answers
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for _ in range(2):
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == model.answers


def test_metrics_tell_of_the_disk(model, llm):
    answers(llm)
    answers(llm)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    disk = llm.stats().disk
    assert metrics["jpaged:disk_cache_hits"].value == disk.hits > 0
    assert metrics["jpaged:disk_written_bytes"].value == disk.written_bytes > 0
    assert metrics["jpaged:disk_failures"].value == disk.failures
    assert metrics["jpaged:disk_open"].value == 1 and metrics["jpaged:disk_break_even_tokens"].value == 8
    assert not any(name.startswith("jpaged:disk") for name in (metric.name for metric in model.roomy.get_metrics()))


def test_a_damaged_file_is_a_miss(model, llm, caplog):
    answers(llm)
    file = llm.control.engine.memory.tiers.each[0].store._file
    llm.control.engine.memory.tiers.each[0].store._thread.submit(lambda: None).result()  # all is written
    whole = np.frombuffer(os.pread(file._file.fileno(), file.num_bytes, 0), np.uint8)
    os.pwrite(file._file.fileno(), (whole ^ 1).tobytes(), 0)
    before = llm.stats().disk
    assert answers(llm, [0]) == model.answers[:1]
    after = llm.stats().disk
    assert after.failures == before.failures + 8 and after.hits == before.hits
    assert answers(llm) == model.answers
    assert "blocks of the disk tier are damaged: their tokens are computed" in caplog.text


def test_a_request_that_is_aborted_while_its_blocks_are_read_leaves_nothing(model, llm):
    answers(llm)
    with hanging(llm):
        request = llm.input_processor.process({"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
        llm.control.engine.add(request)
        assert llm.control.engine.memory.tiers.prefetch.waits_for(request.request_id, 0.0) is not None
        llm.control.engine.step()
        assert llm.control.engine.memory.num_used_blocks == 0
        llm.control.engine.abort(request)
        check_empty(llm)
    assert answers(llm) == model.answers


def test_ctrl_c_while_blocks_are_read_leaves_nothing(model, llm):
    answers(llm)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    with hanging(llm):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            answers(llm)
        signal.signal(signal.SIGALRM, before)
        check_empty(llm)
    assert answers(llm) == model.answers


@pytest.mark.parametrize("name", ["to_tiers", "from_tiers"])
def test_a_device_call_that_fails_changes_no_later_token(model, llm, monkeypatch, name):
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
    assert llm.stats().disk.num_blocks > 0, "what was sent before stays"
    assert answers(llm) == model.answers
    assert answers(llm) == model.answers


def test_new_weights_find_nothing_of_the_old_ones(model, llm):
    answers(llm)
    before = llm.stats().disk.hits
    with llm.control.engine.lock:
        llm.control.engine.memory.new_generation()  # which is how weights are replaced
    assert answers(llm) == model.answers and llm.stats().disk.hits == before


def test_after_the_warm_up_nothing_is_compiled_for_the_disk(model, tmp_path):
    llm = disk_engine(model.folder, tmp_path, model.pool)
    llm.warmup(use_tqdm=False)
    answers(llm)
    assert answers(llm) == model.answers
    assert llm.stats().disk.hits > 0 and llm.num_recompiles == 0
    tier = llm.control.engine.memory.tiers
    llm.close()
    assert not tier.is_open


def test_without_a_place_on_disk_the_engine_warns_and_goes_without(model, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(UserWarning, match="the engine runs without a disk"):
        llm = disk_engine(model.folder, tmp_path / "file" / "below", model.pool)
    assert llm.stats().disk is None and answers(llm, [0]) == model.answers[:1]


def test_a_disk_without_room_for_a_large_page_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="disk_space=1e-09 GiB, 1 bytes, holds no large page of"):
        disk_engine(model.folder, tmp_path, model.pool, disk_space=1e-9)


def test_a_deterministic_engine_gives_the_same_bits(model, tmp_path):
    def logprobs(llm):
        found = []
        for prompt, params in zip(PROMPTS[:3], PARAMS[:3], strict=True):
            (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            found.append([next(iter(place.values())).logprob for place in output.outputs[0].logprobs])
        return found

    plain = LLM(model.folder, deterministic=True, **SETTINGS)
    expected = logprobs(plain)
    llm = disk_engine(model.folder, tmp_path, model.pool * 2 // 3, deterministic=True)
    assert logprobs(llm) == expected and logprobs(llm) == expected
    assert llm.stats().disk.hits > 0
    check_empty(llm)


def test_after_kill_9_the_next_engine_finds_what_was_written_and_gives_the_same_tokens(model, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys; from test_disk_cache import *; "
        "llm = disk_engine(sys.argv[1], sys.argv[2], int(sys.argv[3])); found = answers(llm); answers(llm, [0]); "
        "llm.control.engine.memory.tiers.each[0].store._thread.submit(lambda: None).result(); "
        "print(found, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run_on_devices(1, program, model.folder, tmp_path / "disk", model.pool)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.splitlines()[-1] == str(model.answers)
    llm, reader = (disk_engine(model.folder, tmp_path / "disk", model.pool) for _ in range(2))
    assert answers(reader) == answers(llm) == model.answers
    for engine in (llm, reader):
        disk = engine.stats().disk
        assert disk.hits >= 4 * 48 and disk.failures == 0
        check_empty(engine)
    assert reader.stats().disk.written_bytes == 0, "the first one writes"
    reader.close()
    llm.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "seed", "pages", "options"),
    [("gemma2", 0, 20, {}), ("jamba", 1, 20, {"state_checkpoint_interval": 16})],
)
def test_windows_and_states_come_back_too(name, seed, pages, options, tmp_path):
    make_checkpoint(name, tmp_path, seed)
    roomy = LLM(str(tmp_path), **SETTINGS | options)
    expected, page = answers(roomy), roomy.memory_report().page_bytes
    llm = disk_engine(tmp_path, tmp_path / "disk", pages * page, **options)
    assert answers(llm) == expected and answers(llm) == expected
    assert llm.stats().disk.hits > 0
    check_empty(llm)


@pytest.mark.nightly
def test_two_devices_keep_their_shares_of_each_block(model, tmp_path):
    done = run_on_devices(2, HERE / "disk_by_devices.py", model.folder, tmp_path, model.pool // 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the same tokens"

"""An engine's state is a value: written, it goes on in another engine as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from greedy_reference import random_prompts
from near import Near
from tiny_chat_model import byte_level_tokenizer, make_chat_model

from jpaged import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    EngineStopped,
    RequestOutputKind,
    SamplingParams,
    StateRefused,
    StructuredOutputsParams,
)
from jpaged.engine.saved_state.folder import FORMAT, _of_json, read_about, read_state, write_state
from jpaged.engine.saved_state.identity import model_facts
from jpaged.engine.saved_state.keeper import PeriodicSaver
from jpaged.execution.transfer.pool_blocks import PoolBlocks

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 6, "max_model_len": 96, "max_num_batched_tokens": 16}
SHORT, THIRD, FOURTH, LONG = sorted(random_prompts(lengths=(40, 9, 20, 33)), key=len)
REQUESTS = [
    (LONG, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, prompt_logprobs=1, logprobs=2)),
    (SHORT, SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True, n=2, stop=["never said"])),
    (THIRD, SamplingParams(temperature=1.2, seed=2, max_tokens=25, presence_penalty=0.5, logit_bias={5: 1.0})),
    (THIRD + SHORT, SamplingParams(temperature=0.7, seed=3, max_tokens=9, ignore_eos=True, n=8, bad_words=["ab"])),
    (FOURTH, SamplingParams(max_tokens=24, seed=4, structured_outputs=StructuredOutputsParams(regex="(ab|cd|e ){30}"))),
    (FOURTH, SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, allowed_token_ids=[9, 10, 30, 77])),
]
BEAMS = BeamSearchParams(3, 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    llm = LLM(str(folder), **SETTINGS)
    page = llm.memory_report().page_bytes
    return SimpleNamespace(folder=str(folder), page=page, expected=undisturbed(llm))


def undisturbed(llm):
    for prompt, params in REQUESTS:
        add(llm, prompt, params)
    add(llm, THIRD, BEAMS)
    while llm.control.engine.has_work:
        llm.control.engine.step()
    return finished(llm)


def add(llm, prompt, params):
    request = llm.input_processor.process({"prompt_token_ids": prompt}, params)
    llm.control.engine.add(request)
    return request


def finished(llm):
    """All that clients are told of the requests that are awaited; then these are let go of."""
    engine = llm.control.engine
    requests = list(engine.requests.awaited.values())
    outputs = [answer(llm.output_processor.whole(request)) for request in requests]
    engine.abort(*requests)
    assert_nothing_is_left(llm)
    return outputs


def lengths(llm):
    """Return how many tokens each sequence of the awaited requests has."""
    return [
        len(s.token_ids)
        for r in llm.control.engine.requests.awaited.values()
        for part in r.all_requests
        for s in part.sequences
    ]


def answer(output):
    each = [(o.token_ids, o.text, o.finish_reason, o.stop_reason, close(o.logprobs)) for o in output.outputs]
    return output.prompt_token_ids, each, close(output.prompt_logprobs)


def close(logprobs):
    """What is computed again in another batch differs in the last bits."""
    if logprobs is None:
        return None
    return [one and {token: Near(found.logprob) for token, found in one.items()} for one in logprobs]


def assert_nothing_is_left(llm):
    engine = llm.control.engine
    assert not engine.has_work and not engine.requests.awaited and not engine.requests.restored
    assert engine.memory.num_used_blocks == 0 and not len(engine.runner.worker.host)
    engine.memory.check_invariants()


def begin(model, steps, **options):
    llm = LLM(model.folder, **SETTINGS | options)
    for prompt, params in REQUESTS:
        add(llm, prompt, params)
    add(llm, THIRD, BEAMS)
    for _ in range(steps):
        llm.control.engine.step()
    return llm


@pytest.mark.parametrize("steps", [0, 9, 30, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 17, 45, 60))])
def test_a_new_engine_goes_on_with_the_same_answers(model, tmp_path, steps):
    llm = begin(model, steps, kv_cache_memory_bytes=30 * model.page)
    saved = llm.save_state(tmp_path)
    tokens = lengths(llm)
    used = llm.control.engine.memory.num_used_blocks
    llm.close()
    other = LLM.restore_state(tmp_path)
    assert lengths(other) == tokens
    assert other.control.engine.memory.num_used_blocks == used and saved.num_requests == 7
    other.control.engine.memory.check_invariants()
    outputs = other.resume(use_tqdm=False)
    assert [answer(output) for output in outputs] == model.expected
    assert_nothing_is_left(other)


def test_a_later_save_copies_what_has_changed_and_is_as_whole(model, tmp_path, monkeypatch):
    llm = begin(model, 12, kv_cache_memory_bytes=30 * model.page)
    read, copied = PoolBlocks.read, []

    def noting(self, pool, blocks):
        copied.append(sum(map(len, blocks[0])))
        return read(self, pool, blocks)

    monkeypatch.setattr(PoolBlocks, "read", noting)
    for steps in (0, 1, 30, 1):
        for _ in range(steps):
            llm.control.engine.step()
        saved = llm.save_state(tmp_path)
    held = sum(map(len, read_state(tmp_path).host["replicas"][0]["held"]))
    assert copied[1] < copied[0] and copied[3] < held, "everything is copied again"
    kept = shutil.copytree(tmp_path, tmp_path.with_name("kept"))
    (file,) = (p for p in Path(saved.path).rglob("0.0.0"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    llm.save_state(tmp_path)
    assert copied[-1] == held, "what was damaged on the disk was taken over"
    llm.close()
    for folder in (kept, tmp_path):
        other = LLM.restore_state(folder)
        other.control.engine.memory.check_invariants()
        assert [answer(output) for output in other.resume(use_tqdm=False)] == model.expected


def test_a_smaller_pool_and_batch_compute_again_what_has_no_room(model, tmp_path):
    begin(model, 25, kv_cache_memory_bytes=30 * model.page).save_state(tmp_path)
    other = LLM.restore_state(tmp_path, kv_cache_memory_bytes=17 * model.page)
    kept = [request.num_preemptions for request in other.control.engine.scheduler.running]
    assert 0 < len(kept) < 4 and other.control.engine.memory.num_available_pages < 17
    other.control.engine.memory.check_invariants()
    assert [answer(output) for output in other.resume(use_tqdm=False)] == model.expected
    assert_nothing_is_left(other)


def test_swapped_requests_come_back_from_what_was_written(model, tmp_path):
    swapping = {"kv_cache_memory_bytes": 17 * model.page, "preemption_mode": "swap"}
    llm, steps = begin(model, 0, **swapping), 0
    while not llm.control.engine.scheduler.swapped:
        llm.control.engine.step()
        steps += 1
    num_swapped = len(llm.control.engine.runner.worker.host)
    llm.save_state(tmp_path)
    other = LLM.restore_state(tmp_path)
    assert other.control.engine.scheduler.swapped and len(other.control.engine.runner.worker.host) == num_swapped > 0
    other.control.engine.memory.check_invariants()
    assert [answer(output) for output in other.resume(use_tqdm=False)] == model.expected
    assert_nothing_is_left(other)
    without = LLM.restore_state(tmp_path, preemption_mode="recompute")
    assert not without.control.engine.scheduler.swapped and not len(without.control.engine.runner.worker.host)
    assert [answer(output) for output in without.resume(use_tqdm=False)] == model.expected


def test_what_no_engine_here_could_finish_ends_and_says_why(model, tmp_path):
    llm = begin(model, 9, kv_cache_memory_bytes=30 * model.page)
    prompt = {"prompt_token_ids": (LONG + LONG)[:59]}
    llm.control.engine.add(llm.input_processor.process(prompt, SamplingParams(max_tokens=1), prefill_only=True))
    llm.save_state(tmp_path)
    other = LLM.restore_state(tmp_path, max_model_len=59)
    *outputs, whole = other.resume(use_tqdm=False)
    assert whole.outputs[0].finish_reason == "length", "the token that it draws is never computed"
    (ended,) = outputs[0].outputs
    assert ended.stop_reason == "the restored request may grow to 60 tokens, above max_model_len=59"
    assert ended.finish_reason == "abort"
    others = [1, 2, 3, 4, 5, 6]
    assert [answer(outputs[i]) for i in others] == [model.expected[i] for i in others]
    assert_nothing_is_left(other)


def test_the_warm_prefix_cache_and_pins_survive(model, tmp_path):
    llm = LLM(model.folder, kv_cache_memory_bytes=30 * model.page, **SETTINGS)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    pinned = llm.pin_prefix({"prompt_token_ids": FOURTH})
    (first,) = llm.generate({"prompt_token_ids": LONG, "cache_salt": "tenant"}, greedy, use_tqdm=False)
    llm.save_state(tmp_path)
    other = LLM.restore_state(tmp_path)
    assert other.pinned_prefixes == [pinned] and other.resume(use_tqdm=False) == []
    assert other.memory_report().groups[0].used == llm.memory_report().groups[0].used > 0
    (again,) = other.generate({"prompt_token_ids": LONG, "cache_salt": "tenant"}, greedy, use_tqdm=False)
    (stranger,) = other.generate({"prompt_token_ids": LONG}, greedy, use_tqdm=False)
    (behind,) = other.generate({"prompt_token_ids": FOURTH}, greedy, use_tqdm=False)
    assert [o.num_cached_tokens for o in (again, stranger, behind)] == [32, 0, 32]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids == stranger.outputs[0].token_ids
    other.unpin(pinned)
    assert_nothing_is_left(other)
    elsewhere = LLM.restore_state(tmp_path, kv_cache_memory_bytes=17 * model.page, enable_prefix_caching=True)
    assert elsewhere.pinned_prefixes == [pinned]
    (behind,) = elsewhere.generate({"prompt_token_ids": FOURTH}, greedy, use_tqdm=False)
    assert behind.num_cached_tokens == 32


@pytest.mark.parametrize("block_size", [SETTINGS["block_size"], 2 * SETTINGS["block_size"]])
def test_a_pinned_prefix_that_is_too_long_for_the_new_engine_is_dropped_with_a_word(
    model, tmp_path, caplog, block_size
):
    llm = LLM(model.folder, **SETTINGS)
    long, short = llm.pin_prefix({"prompt_token_ids": LONG}), llm.pin_prefix({"prompt_token_ids": THIRD})
    llm.save_state(tmp_path)
    other = LLM.restore_state(tmp_path, max_model_len=32, block_size=block_size)
    assert f"pinned prefix {long.seq_id} of 40 tokens is dropped: max_model_len=32" in caplog.text
    assert other.resume(use_tqdm=False) == [] and other.pinned_prefixes == [short]
    other.release_memory()
    other.restore_memory()
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    (output,) = other.generate({"prompt_token_ids": SHORT}, greedy, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    other.unpin(short)
    assert_nothing_is_left(other)


def test_a_save_after_the_last_one_was_deleted_says_so_and_copies_all(model, tmp_path, caplog):
    llm = begin(model, 9)
    llm.save_state(tmp_path / "state")
    shutil.rmtree(tmp_path / "state")
    llm.save_state(tmp_path / "state")
    assert "000001 is not there" in caplog.text
    LLM.restore_state(tmp_path / "state")


def test_a_file_is_refused_as_the_folder_of_a_state(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="file' is a file: a state is saved to a folder"):
        LLM(model.folder, **SETTINGS).save_state(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_request_that_a_stop_token_ended_is_saved_though_nobody_awaits_the_token_behind(model, tmp_path):
    llm = LLM(model.folder, **SETTINGS)
    allowed = [9, 10, 30, 77]
    ends = SamplingParams(temperature=1.0, seed=1, max_tokens=60, allowed_token_ids=allowed, stop_token_ids=[9])
    request = add(llm, THIRD, ends)
    while llm.control.engine.has_work:
        llm.control.engine.step()
    assert request.sequences[0].finish_reason == "stop" and request.sequences[0].num_pending
    assert llm.save_state(tmp_path).num_requests == 1
    expected = finished(llm)
    other = LLM.restore_state(tmp_path)
    assert [answer(output) for output in other.resume(use_tqdm=False)] == expected


def test_the_largest_numbers_that_a_request_may_have_are_saved(model, tmp_path):
    llm, most = LLM(model.folder, **SETTINGS, scheduling_policy="priority"), 2**63 - 1
    largest = SamplingParams(temperature=1.0, seed=most, top_k=most, max_tokens=most, ignore_eos=True)
    llm.control.engine.add(llm.input_processor.process({"prompt_token_ids": SHORT}, largest, -most))
    for _ in range(3):
        llm.control.engine.step()
    llm.save_state(tmp_path)
    other = LLM.restore_state(tmp_path, scheduling_policy="fcfs", block_size=16)  # where no priority counts
    while llm.control.engine.has_work:
        llm.control.engine.step()
    assert [answer(output) for output in other.resume(use_tqdm=False)] == finished(llm)


def test_seeds_are_drawn_on_from_where_they_were(model, tmp_path):
    drawn = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
    llm = LLM(model.folder, kv_cache_memory_bytes=30 * model.page, **SETTINGS)
    llm.generate({"prompt_token_ids": SHORT}, drawn, use_tqdm=False)
    llm.save_state(tmp_path)
    later = [
        one.generate({"prompt_token_ids": SHORT}, drawn, use_tqdm=False) for one in (llm, LLM.restore_state(tmp_path))
    ]
    assert later[0][0].outputs[0].token_ids == later[1][0].outputs[0].token_ids
    assert later[0][0].request_id == later[1][0].request_id


def test_a_state_is_loaded_into_a_fresh_engine_only(model, tmp_path):
    llm = begin(model, 3, kv_cache_memory_bytes=30 * model.page)
    llm.save_state(tmp_path)
    with pytest.raises(RuntimeError, match="this engine has requests or pinned prefixes already"):
        llm.load_state(tmp_path)
    assert finished_after(llm) == model.expected


def finished_after(llm):
    while llm.control.engine.has_work:
        llm.control.engine.step()
    return finished(llm)


def test_a_signal_in_the_middle_of_a_batch_saves_all_of_it(model, tmp_path, monkeypatch):
    """Also the answers that were ready, of which nobody had been told."""
    llm = LLM(model.folder, kv_cache_memory_bytes=30 * model.page, **SETTINGS)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in REQUESTS]
    params = [replace(params, seed=number) for number, (_, params) in enumerate(REQUESTS)]
    dispatch, steps = llm.control.engine.runner.dispatch_all, count()

    def interrupted(scheduled):
        if next(steps) == 45:
            signal.raise_signal(signal.SIGTERM)
        return dispatch(scheduled)

    monkeypatch.setattr(llm.control.engine.runner, "dispatch_all", interrupted)
    before = signal.signal(signal.SIGTERM, lambda number, frame: llm.save_state(tmp_path))
    try:
        expected = llm.generate(prompts, params, use_tqdm=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    other = LLM.restore_state(tmp_path)
    unfinished = [request.status.value != "finished" for request in other.control.engine.requests.restored.values()]
    assert len(unfinished) == len(REQUESTS) and any(unfinished) and not all(unfinished)
    assert [answer(output) for output in other.resume(use_tqdm=False)] == [answer(output) for output in expected]
    assert_nothing_is_left(other)


def test_a_handler_in_the_middle_of_a_step_is_refused(model, tmp_path, monkeypatch):
    llm = LLM(model.folder, kv_cache_memory_bytes=30 * model.page, **SETTINGS)
    monkeypatch.setattr(llm.control.engine.runner, "dispatch_all", lambda steps: llm.save_state(tmp_path))
    with pytest.raises(RuntimeError, match="refused in the middle of a step"):
        llm.generate({"prompt_token_ids": SHORT}, use_tqdm=False)
    monkeypatch.undo()
    assert undisturbed(llm) and not list(tmp_path.iterdir())


# ------------------------------------------------------------------ what is refused


CLAIM = """
import sys
from pathlib import Path
from jpaged.claims import claim_folder
claim = claim_folder(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
claim.release()
"""


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    begin(model, 12, kv_cache_memory_bytes=30 * model.page).save_state(folder)
    return folder


@pytest.fixture(scope="module")
def fresh(model):
    """An engine that refuses every state in this part, and answers as ever."""
    llm = LLM(model.folder, kv_cache_memory_bytes=30 * model.page, **SETTINGS)
    yield llm
    assert undisturbed(llm) == model.expected


LAYOUT_OF_FORMAT_5 = {
    "": "inputs pictures pin_seconds pins replicas requests",
    "inputs": "requests seeds sequences",
    "requests": "adapter alone allowed_mask arrival_number arrival_time bad_words beam cache_salt encoder_tokens "
    "eos_ids finished_time first_scheduled_time first_token_time images kept_tokens later max_total_tokens name "
    "num_cached_tokens num_preemptions num_swaps packed params pause_ages prefix_ends priority prompt prompt_logprobs "
    "prompt_token_ids request_id retention seed sequences status stop_ids tier_tokens",
    "requests.sequences": "candidates cumulative_logprob finish_reason fork_at index logprobs needs_host num_computed "
    "num_prompt output_token_ids parent score seq_id slot stop_reason",
    "replicas": "held host_blocks lost_pins memory scheduler",
    "replicas.memory": "associations blocks cached clock generation host images links lost pinned protected_bytes "
    "recent requests retained sequences swapped version",
    "replicas.memory.blocks": "free groups num_pages pages touched",
    "replicas.memory.blocks.groups": "evictable open protected stale",
    "replicas.memory.requests": "association begun directives encoder_tokens ends goes_on id item_end junction "
    "kept_tokens leaves_less marks most_kept parts_at prompt_tokens",
    "replicas.memory.host": "free owners",
    "replicas.scheduler": "free_slots max_num_seqs num_added num_recomputes num_swaps requests speculation",
}


def test_the_layout_of_a_format_never_changes(saved):
    """Whoever changes what is saved raises `FORMAT`, unless it is read without what came new, and writes the new layout
    down here."""
    assert FORMAT == 5
    host = read_state(saved).host
    for path, names in LAYOUT_OF_FORMAT_5.items():
        data = host
        for step in filter(None, path.split(".")):
            data = data[0][step] if isinstance(data, list) else data[step]
        data = data[0] if isinstance(data, list) else data
        assert sorted(data) == sorted(names.split()), f"{path or 'the whole'} has another layout: raise FORMAT"
    tables = next(iter(host["replicas"][0]["memory"]["sequences"].values()))
    assert sorted(tables) == [
        "behind",
        "chains",
        "computed",
        "hashed",
        "predicted",
        "request",
        "slots",
        "tables",
        "version",
    ]


@pytest.mark.parametrize("name", ["state.json", "host.msgpack", "blocks/pool_0_0/0.0.0"])
def test_a_flipped_byte_is_noticed(saved, fresh, tmp_path, name):
    copied = shutil.copytree(saved, tmp_path / "state")
    file = copied / "000001" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(StateRefused, match=f"000001 is damaged: .*{name}"):
        fresh.load_state(copied)


def test_a_missing_or_foreign_file_is_noticed(saved, fresh, tmp_path):
    copied = shutil.copytree(saved, tmp_path / "state")
    (copied / "000001" / "more").touch()
    with pytest.raises(StateRefused, match="is damaged: more is not one of its files"):
        fresh.load_state(copied)
    (copied / "000001" / "more").unlink()
    (copied / "000001" / "host.msgpack").unlink()
    with pytest.raises(StateRefused, match=r"is damaged: host\.msgpack is missing"):
        fresh.load_state(copied)
    with pytest.raises(StateRefused, match="has no saved state"):
        fresh.load_state(tmp_path / "nowhere")


def test_another_format_another_model_and_other_weights_are_refused(saved, fresh, tmp_path, monkeypatch):
    for name, number in (("format", 0), ("model", 1), ("weights", 2)):
        copied = shutil.copytree(saved, tmp_path / name)
        about = read_about(copied / "000001")
        match number:
            case 0:
                about["format"] += 1
                told = rf"has state format {FORMAT + 1}, written by jpaged .*; this version reads 3, 4 and {FORMAT}"
            case 1:
                about["model"] |= {"name": "somebody/else", "config": "0"}
                told = "it is of another model, 'somebody/else', whose configuration is not that of"
            case _:
                about["model"]["weights"] = [4, 1]
                told = "it is of other weights than"
        checksum = {"checksum": _of_json(about)}
        (copied / "000001" / "state.json").write_text(json.dumps({**about, **checksum}))
        with pytest.raises(StateRefused, match=told):
            fresh.load_state(copied)


def test_changed_weights_are_other_weights(model, saved):
    llm = LLM(model.folder, kv_cache_memory_bytes=30 * model.page, **SETTINGS)
    llm.update_params(jax.tree.map(lambda leaf: leaf * 1.5, llm.params))
    with pytest.raises(StateRefused, match="it is of other weights than"):
        llm.load_state(saved)


@pytest.mark.parametrize("when", ["while they are summed up", "before a save that sleep refuses"])
def test_a_state_is_of_the_weights_that_computed_it(model, tmp_path, monkeypatch, when):
    settings = {"kv_cache_memory_bytes": 30 * model.page, **SETTINGS}
    llm = LLM(model.folder, **settings)
    new = jax.tree.map(lambda leaf: leaf * 1.5, llm.params)
    if when == "while they are summed up":

        def replaced(*args):
            found = model_facts(*args)
            if not llm.control.engine.runner.worker.model.num_updates:
                llm.update_params(new)
            return found

        monkeypatch.setattr("jpaged.engine.saved_state.keeper.model_facts", replaced)
    else:
        llm.update_params(new)
        llm.sleep(1)
        with pytest.raises(RuntimeError, match=r"save_state\(\) needs the memory that release_memory\(\) gave back"):
            llm.save_state(tmp_path)
        llm.wake_up()
    llm.save_state(tmp_path)
    fresh = LLM(model.folder, **settings)
    with pytest.raises(StateRefused, match="it is of other weights than"):
        fresh.load_state(tmp_path)
    fresh.update_params(new)
    fresh.load_state(tmp_path)


async def save_every(llm, folder):
    async with AsyncLLM.from_llm(llm) as engine:
        with pytest.raises(OSError, match="/state is used by"):
            engine.save_every(folder, 1.0)


def test_a_folder_that_another_engine_saves_to_gets_no_other_state(saved, fresh, tmp_path):
    copied = shutil.copytree(saved, tmp_path / "state")
    with subprocess.Popen([sys.executable, "-c", CLAIM, copied], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(OSError, match=rf"/state is used by process {other.pid}: "):
            fresh.save_state(copied)
        asyncio.run(save_every(fresh, copied))
        other.communicate("")
    read_state(copied)
    assert sorted(path.name for path in copied.iterdir()) == ["000001"]


def test_a_disk_that_stays_full_is_logged_once_and_again_when_it_was_not(caplog):
    ends = iter([OSError("full"), OSError("full"), None, OSError("full"), EngineStopped()])
    left = Event()

    def save():
        end = next(ends)
        if end is not None:
            left.set() if isinstance(end, EngineStopped) else None
            raise end

    saver = PeriodicSaver(save, count().__next__, 0.001)
    assert left.wait(60)
    saver.stop()
    said = [record for record in caplog.records if "could not be saved" in record.message]
    assert [record.exc_info for record in said] == [None, None] and said[0].message.endswith(": full")


def test_an_interrupted_save_leaves_the_one_before(saved, fresh, tmp_path, monkeypatch):
    copied = shutil.copytree(saved, tmp_path / "state")
    (copied / "000002.saving").mkdir()  # left by a process that was killed
    (copied / "000002.saving" / "host.msgpack").write_bytes(b"half")
    monkeypatch.setattr("jpaged.engine.saved_state.folder._write_arrays", fails)
    llm_requests = read_state(copied).host["requests"]
    with pytest.raises(OSError, match="no room"):
        write_state(copied, {}, {}, {"a": np.zeros(3)})
    assert read_state(copied).host["requests"] == llm_requests
    assert sorted(path.name for path in copied.iterdir()) == ["000001"]


def fails(*args):
    raise OSError("no room")


# ------------------------------------------------------------------ many clients


def test_clients_go_on_with_requests_by_their_names(model, tmp_path):
    llm = LLM(model.folder, kv_cache_memory_bytes=30 * model.page, **SETTINGS)
    params = [replace(p, logprobs=None, prompt_logprobs=None, seed=i) for i, (_, p) in enumerate(REQUESTS)]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in REQUESTS]
    expected = [[o.text for o in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]

    async def first():
        async with AsyncLLM.from_llm(llm) as engine:
            heard = asyncio.Event()

            async def listen(i):
                async for output in engine.generate(prompts[i], params[i], f"client-{i}"):
                    if i == 0 and len(output.outputs[0].token_ids) > 4:
                        heard.set()

            tasks = [asyncio.create_task(listen(i)) for i in range(len(prompts))]
            await heard.wait()
            saved = await engine.save_state(tmp_path)
            await asyncio.gather(*tasks)
            return saved

    saved = asyncio.run(first())
    assert 0 < saved.pause_seconds < saved.seconds and saved.num_bytes > 0

    async def second():
        other = LLM(model.folder, kv_cache_memory_bytes=30 * model.page, **SETTINGS)
        async with AsyncLLM.from_llm(other) as engine:
            names = await engine.load_state(tmp_path)
            assert names == engine.restored_requests and len(names) == saved.num_requests >= 2
            with pytest.raises(ValueError, match="client-1' came with a saved state"):
                await anext(engine.generate(prompts[0], params[0], "client-1"))
            with pytest.raises(ValueError, match="'nobody' is none of the restored requests"):
                await anext(engine.resume("nobody"))
            texts = await asyncio.gather(*(resumed(engine, name) for name in names))
            assert engine.restored_requests == []
        assert_nothing_is_left(other)
        return dict(zip(names, texts, strict=True))

    async def resumed(engine, name):
        texts: dict[int, str] = {}
        async for output in engine.resume(name, RequestOutputKind.DELTA):
            for one in output.outputs:
                texts[one.index] = texts.get(one.index, "") + one.text
        return [texts[i] for i in sorted(texts)]

    found = asyncio.run(second())
    assert "client-1" in found
    assert found == {name: expected[int(name.removeprefix("client-"))] for name in found}


def test_restored_requests_wait_for_clients_and_can_be_given_up(model, tmp_path):
    llm = begin(model, 12, kv_cache_memory_bytes=30 * model.page)
    llm.save_state(tmp_path)
    restored = LLM.restore_state(tmp_path)

    async def main():
        async with AsyncLLM.from_llm(restored) as engine:
            names = engine.restored_requests
            assert len(names) == 7, "an LLM's requests are called by their numbers"
            while engine.stats().num_running + engine.stats().num_waiting:
                await asyncio.sleep(0.01)
            assert engine.restored_requests == names, "they have finished, and wait"
            await engine.abort(names[0])
            outputs = [output async for output in engine.resume(names[-1])]
            assert len(outputs) == 1 and answer(outputs[0]) == model.expected[-1], "a beam search tells its end"
            async for output in engine.resume(names[1], RequestOutputKind.FINAL_ONLY):
                assert answer(output) == model.expected[1]
            assert engine.restored_requests == names[2:-1]

    asyncio.run(asyncio.wait_for(main(), 60))
    assert_nothing_is_left(restored)


def test_a_saver_saves_again_and_again_where_something_happens(model, tmp_path):
    async def main():
        llm = LLM(model.folder, kv_cache_memory_bytes=30 * model.page, **SETTINGS)
        async with AsyncLLM.from_llm(llm) as engine:
            engine.save_every(tmp_path, 0.02)
            with pytest.raises(RuntimeError, match="save_every"):
                engine.save_every(tmp_path, 1)
            while engine.last_save is None:
                await asyncio.sleep(0.01)
            first = engine.last_save.path
            await asyncio.sleep(0.1)
            assert engine.last_save.path == first, "nothing has happened"
            async for _ in engine.generate({"prompt_token_ids": LONG}, REQUESTS[0][1], "one"):
                pass
            while engine.last_save.path == first:
                await asyncio.sleep(0.01)
        assert [path.name for path in tmp_path.iterdir()] == [engine.last_save.path.rpartition("/")[2]]

    asyncio.run(asyncio.wait_for(main(), 60))

"""Blocks of the pool to disk and back, bit for bit, by a thread beside the engine."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_runner

from jpaged.execution.transfer.tiers import BlockFile, BlockThread, block_thread
from jpaged.memory import TierFill, TierRead, TierWrite
from jpaged.memory.tiers import StoredBlock
from jpaged.scheduling import ScheduledStep

PAGES = 90


@pytest.fixture
def thread(tmp_path):
    thread = BlockThread(BlockFile(tmp_path, 8 << 20))
    yield thread
    thread.close()


@pytest.fixture
def runner(thread):
    """A runner with a disk whose pool holds random numbers."""
    runner = tiny_runner(num_pages=PAGES, tiers=[thread])
    values = jax.random.normal(jax.random.key(0), runner.spec.shape, jnp.float32)
    runner.worker.pool = jax.device_put(values, runner.worker.pool.sharding)
    return runner


def pool(runner) -> np.ndarray:
    return np.array(runner.worker.pool).reshape(runner.spec.views[0])


def writes(runner, blocks) -> list[TierWrite]:
    size = runner.spec.layout.groups[0].block_bytes
    return [TierWrite(0, int(block), place * size, b"%d" % block) for place, block in enumerate(blocks)]


def read(runner, thread, written) -> TierRead:
    size = runner.spec.layout.groups[0].block_bytes
    stored = [StoredBlock(0, write.name, b"", write.place, size) for write in written]
    asked = TierRead(stored, [write.name for write in written])
    thread.read(asked)
    assert asked.wait(60)
    return asked


def queued_read(thread, written) -> TierRead:
    stored = [StoredBlock(0, write.name, b"", write.place, 8) for write in written]
    asked = TierRead(stored, [write.name for write in written])
    thread.read(asked)
    return asked


@pytest.mark.parametrize("number", [1, 7, 85])
def test_blocks_come_back_to_other_places_and_nothing_else_changes(runner, thread, number):
    rng = np.random.default_rng(number)
    source, target = rng.permutation(PAGES)[:number], rng.permutation(PAGES)[:number]
    want = pool(runner)
    want[target] = want[source]
    written = writes(runner, source)
    runner.dispatch(ScheduledStep(work={"to_tiers": written}))
    asked = read(runner, thread, written)
    assert not asked.damaged and len(asked.contents) == number and asked.seconds > 0
    fills = [TierFill(0, int(t), asked.contents[0, w.name]) for t, w in zip(target, written, strict=True)]
    runner.dispatch(ScheduledStep(work={"from_tiers": fills}))
    assert (pool(runner) == want).all()
    assert thread.num_queued_bytes == 0


def test_what_is_written_is_what_the_step_before_left(runner, thread):
    before = pool(runner)
    written = writes(runner, range(4))
    fills = [TierFill(0, block, np.zeros(runner.spec.layout.groups[0].block_bytes, np.uint8)) for block in range(4)]
    runner.dispatch(ScheduledStep(work={"to_tiers": written, "from_tiers": fills}))
    asked = read(runner, thread, written)
    for write in written:
        assert (asked.contents[0, write.name].view(np.float32).reshape(before[0].shape) == before[write.block]).all()
    assert not pool(runner)[:4].any()


def test_a_block_out_of_range_is_refused(runner):
    with pytest.raises(RuntimeError, match=r"blocks 90\.\.90 of group 0 are outside \[0, 90\)"):
        runner.dispatch(ScheduledStep(work={"to_tiers": [TierWrite(0, PAGES, 0, b"one")]}))
    with pytest.raises(RuntimeError, match=r"blocks 90\.\.90 of group 0 are outside \[0, 90\)"):
        runner.dispatch(ScheduledStep(work={"from_tiers": [TierFill(0, PAGES, np.zeros(8, np.uint8))]}))


def test_a_cancelled_read_ends_without_reading(runner, thread):
    written = writes(runner, range(3))
    runner.dispatch(ScheduledStep(work={"to_tiers": written}))
    gate = threading.Event()
    thread._thread.submit(gate.wait, 60)
    asked = queued_read(thread, written)
    asked.is_cancelled = True
    gate.set()
    assert asked.wait(60) and not asked.contents and not asked.damaged


def test_what_was_to_be_written_when_all_was_forgotten_is_not_found(runner, thread):
    gate = threading.Event()
    thread._thread.submit(gate.wait, 60)
    written = writes(runner, range(3))
    runner.dispatch(ScheduledStep(work={"to_tiers": written}))
    assert thread.num_queued_bytes > 0
    thread.forget_all()
    gate.set()
    assert len(read(runner, thread, written).damaged) == 3 and thread.num_queued_bytes == 0


def test_an_error_of_the_disk_turns_it_off(runner, thread, monkeypatch, caplog):
    def fails(*_):
        raise OSError(5, "Input/output error")

    written = writes(runner, range(3))
    monkeypatch.setattr(thread._file, "write", fails)
    runner.dispatch(ScheduledStep(work={"to_tiers": written}))
    asked = read(runner, thread, written)
    assert not asked.contents and not thread.is_open
    assert "the disk tier is off from now on: [Errno 5] Input/output error" in caplog.text
    runner.dispatch(ScheduledStep(work={"to_tiers": written}))  # nothing fails


def test_closing_ends_the_thread_and_again_is_no_error(runner, thread):
    runner.dispatch(ScheduledStep(work={"to_tiers": writes(runner, range(3))}))
    thread.close()
    thread.close()
    assert not thread.is_open and read(runner, thread, writes(runner, range(3))).contents == {}


def test_closing_ends_what_is_queued_without_reading_or_writing_it(runner, thread):
    gate = threading.Event()
    thread._thread.submit(gate.wait, 60)
    written = writes(runner, range(3))
    runner.dispatch(ScheduledStep(work={"to_tiers": written}))
    asked = queued_read(thread, written)
    closing = threading.Thread(target=thread.close)
    closing.start()
    while thread.is_open:
        time.sleep(0.001)
    gate.set()
    closing.join(60)
    assert asked.is_done and not asked.contents and not asked.damaged
    assert thread.num_queued_bytes == 0 == thread._file.num_bytes


def test_closing_does_not_wait_for_a_disk_that_hangs(runner, thread, monkeypatch, caplog):
    monkeypatch.setattr(block_thread, "CLOSE_SECONDS", 0.05)
    begun, gate, written = threading.Event(), threading.Event(), writes(runner, range(2))

    def hangs(place, name, num_bytes):
        begun.set()
        assert gate.wait(60)
        return np.zeros(num_bytes, np.uint8)

    monkeypatch.setattr(thread._file, "read", hangs)
    running, queued = (queued_read(thread, written) for _ in range(2))
    assert begun.wait(60)
    thread.close()
    assert running.is_done and queued.is_done, "nobody waits for ever"
    assert "did not end within 0.05 s" in caplog.text
    assert thread._file.num_bytes, "it is in use"
    gate.set()
    thread._ended.result(60)
    assert not running.contents and not queued.contents and thread._file.num_bytes == 0

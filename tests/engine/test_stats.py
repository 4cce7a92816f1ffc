"""What an engine counts, how it is named as metrics, and when the log tells of it."""

from __future__ import annotations

import logging
from dataclasses import FrozenInstanceError, replace

import pytest
from fake_device import Loop
from small_schedulers import make_request, make_scheduler

import jpaged
from jpaged.engine.replica import Replica, take_snapshot
from jpaged.engine.stats import INTERVAL, STEP_BOUNDS, Counters, StatsLog, describe, metrics_of
from jpaged.execution.compile.program import Compilations
from jpaged.metrics import Counter, Gauge, Histogram


class Counted(Loop):
    """A loop that counts as the engine does."""

    def __init__(self, **options):
        super().__init__(make_scheduler(**options))
        self.counters = Counters()
        self.replica = Replica(self.scheduler, 100)

    def drain(self):
        if self.in_flight is not None:
            self.counters.read(self.in_flight[0])
        before = len(self.finished)
        super().drain()
        for request in self.finished[before:]:
            self.replica.let_go(request)

    def snapshot(self):
        return take_snapshot([self.replica], Compilations(), self.counters)


def test_tokens_in_and_out_and_finished_outputs_are_counted():
    loop = Counted()
    loop.run(make_request(5, 3), make_request(9, 4, width=2))
    stats = loop.snapshot()
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (5 + 9, 3 + 4 + 4)
    assert stats.finished == {"length": 3}
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert stats.kv_cache_usage == 0


def test_requests_and_blocks_are_told_while_they_run():
    loop = Counted(max_num_seqs=1)
    for _ in range(2):
        loop.scheduler.add(make_request(6, 3))
    loop.step()
    stats = loop.snapshot()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    (blocks,) = stats.blocks
    assert blocks.used == 2 and stats.kv_cache_usage == 2 / stats.num_pages
    assert (stats.num_prompt_tokens, stats.finished) == (0, {})


def test_prefix_hits_are_counted_when_a_request_has_its_first_token():
    loop = Counted(prefix_caching=True)
    prompt = list(range(1, 13))
    loop.run(make_request(prompt, 2))
    loop.run(make_request(prompt, 2))
    stats = loop.snapshot()
    assert (stats.prefix_queries, stats.prefix_hits) == (24, 8)
    assert stats.prefix_hit_rate == 8 / 24


def test_preemptions_are_counted_by_the_way_back():
    loop = Counted(num_blocks=10)
    loop.run(*(make_request(8, 16) for _ in range(3)))
    stats = loop.snapshot()
    assert stats.num_recomputes > 0 and stats.num_swaps == 0
    assert stats.num_preemptions == stats.num_recomputes == loop.scheduler.num_preemptions


def test_step_times_fall_into_buckets():
    counters = Counters()
    for seconds in (0.0005, 0.001, 0.3, 99.0):
        counters.took(seconds)
    times = counters.step_times
    assert (times.count, times.last) == (4, 99.0) and times.total == pytest.approx(99.3015)
    assert times.buckets[0] == 2 and times.buckets[STEP_BOUNDS.index(0.5)] == 1 and times.buckets[-1] == 1


def test_a_snapshot_cannot_be_changed_and_is_public():
    stats = Counted().snapshot()
    assert isinstance(stats, jpaged.EngineStats)
    with pytest.raises(FrozenInstanceError):
        stats.num_running = 5


def test_metrics_have_vllms_names_and_every_number_of_the_snapshot():
    loop = Counted()
    loop.counters.took(0.3)
    loop.run(make_request(5, 3))
    metrics = metrics_of(loop.snapshot())
    by_name = {metric.name: metric for metric in metrics if not metric.labels}
    assert by_name["jpaged:num_requests_running"] == Gauge("jpaged:num_requests_running", 0)
    assert by_name["jpaged:prompt_tokens"] == Counter("jpaged:prompt_tokens", 5)
    assert by_name["jpaged:generation_tokens"].value == 3
    assert Counter("jpaged:request_success", 1, labels={"finished_reason": "length"}) in metrics
    steps = by_name["jpaged:step_time_seconds"]
    assert isinstance(steps, Histogram)
    assert (steps.count, steps.buckets["0.2"], steps.buckets["0.5"], steps.buckets["+Inf"]) == (1, 0, 1, 1)
    assert all(metric.name.startswith("jpaged:") for metric in metrics)


# ---------------------------------------------------------------------- the log


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def lines(caplog, log, clock, times, snapshot):
    caplog.clear()
    with caplog.at_level(logging.INFO, "jpaged"):
        for clock.now in times:
            log.step_ended(snapshot)
    return [record.getMessage() for record in caplog.records]


def test_the_log_speaks_at_a_bounded_rate(caplog):
    clock, stats = Clock(), Counted().snapshot()
    log = StatsLog(clock)
    every = [0.01 * i for i in range(5000)]
    assert len(lines(caplog, log, clock, every, lambda: stats)) == int(50 / INTERVAL) - 1


def test_a_pause_is_not_counted_into_the_speed(caplog):
    clock, loop = Clock(), Counted()
    log = StatsLog(clock)
    assert lines(caplog, log, clock, [0.0, 1.0, 100.0, 101.0], loop.snapshot) == []
    loop.counters.num_output_tokens += 55
    assert "5.0 output tokens/s" in lines(caplog, log, clock, [105.0, 111.0], loop.snapshot)[0]


def test_nothing_is_said_or_looked_at_unless_somebody_listens(caplog):
    def never():
        raise AssertionError("nobody listens")

    clock = Clock()
    log = StatsLog(clock)
    with caplog.at_level(logging.WARNING, "jpaged"):
        log.step_ended(never)
    log.enabled = False
    assert lines(caplog, log, clock, [0.0, 50.0], never) == []


def test_a_line_says_what_happened_since_the_last():
    before = Counted().snapshot()
    now = replace(before, num_prompt_tokens=50, num_output_tokens=30, prefix_queries=50, prefix_hits=10, num_swaps=2)
    line = describe(before, now, 10.0)
    assert "5.0 prompt tokens/s, 3.0 output tokens/s" in line
    assert "20.0% of prompt tokens from the prefix cache; 2 preempted" in line

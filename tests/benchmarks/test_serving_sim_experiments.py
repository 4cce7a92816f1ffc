"""Experiments of the serving simulation: the host's cost, fits to a real engine, and what a batch is charged for."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from jpaged.benchmarks.serving_sim import own_experiments, paged_experiments, paged_sections, tables
from jpaged.benchmarks.serving_sim.curves import Setting, run_at
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE
from jpaged.benchmarks.serving_sim.models import OPT_13B
from jpaged.benchmarks.serving_sim.own_experiments import _fit
from jpaged.benchmarks.serving_sim.paged_experiments import Context
from jpaged.benchmarks.serving_sim.policies import ORACLE, PAGED
from jpaged.benchmarks.serving_sim.policy import Policy
from jpaged.benchmarks.serving_sim.workload import Workload

SMALL = Workload("small", ((20, 12), (60, 30), (8, 50)))


def test_a_fit_finds_the_factors_and_none_of_them_is_negative():
    rng = np.random.default_rng(0)
    parts = rng.uniform(1, 2, (5, 3))
    assert _fit(parts, parts @ [2.0, 0.5, 0.1]) == pytest.approx([2.0, 0.5, 0.1])
    clipped = _fit(parts, parts @ [2.0, -0.2, 0.1])
    assert clipped[1] == 0.0 and min(clipped) >= 0


def test_a_chatbots_ratio_is_measured_with_less_charged_for():
    context = Context({"ShareGPT, several turns": SMALL}, 10.0, 0, lambda said: None)
    rows = paged_experiments.chatbot_costs(context)
    assert [(row["reading"], row["host"]) for row in rows] == [(True, True), (False, True), (True, False), (False,) * 2]
    setting = Setting(OPT_13B, SMALL, PAPER_ENGINE, 20.0, 0, 1.0)
    every, free = (run_at(each, PAGED, 5.0) for each in (setting, replace(setting, charges_kv=False)))
    assert free.latency < every.latency
    for row, rates in zip(rows, ((1.3, 1.0), (1.4, 1.0), (1.35, 1.0), (1.5, 1.0)), strict=True):
        for system, rate in zip((PAGED, ORACLE), rates, strict=True):
            row["systems"][system] |= {"sustained": rate, "is_least": False}
    text = paged_sections.chatbot_costs(rows)
    for ratio, free in zip(
        (1.30, 1.40, 1.35, 1.50),
        ("nothing", "reading KV", "the host's time", "reading KV and the host's time"),
        strict=True,
    ):
        assert re.search(rf"\| {free} \| .* \| {ratio:.2f} \|", text)
    assert "With neither the ratio is 1.50. What is left to the paper's 2.0 is not explained." in text


def test_rates_that_few_requests_stand_behind_are_named():
    def system(sustained):
        return {"points": [[0.25, 0.1], [4.0, 0.5]], "sustained": sustained, "is_least": False}

    row = {"name": "OPT-13B, ShareGPT", "requests": [25, 400], "systems": {PAGED: system(2.0), ORACLE: system(0.3)}}
    said = paged_sections.few_requests([row])
    assert said.endswith("where that is so: Orca (Oracle), OPT-13B, ShareGPT (30 requests).\n")
    row["systems"][ORACLE] = system(0.6)
    assert paged_sections.few_requests([row]) == ""


def test_the_hosts_table_tells_how_many_requests_were_run_of_each_kind():
    row = {"workload": "ShareGPT", "rate": 2.0, "requests": 5000, "seconds": 3.0, "planned_requests": 1000}
    found = {"steps": [], "requests": [row | {"planned": 2.0}]}
    assert "| 2,000 (1,000) | 600 (5,000) | 10.0, extrapolated from 5,000 |" in tables.host(found)
    found["requests"][0] |= {"requests": 1_000_000, "seconds": 540.0}
    assert "| 540 (1,000,000) | 9.0, measured |" in tables.host(found)


def test_the_hosts_table_has_a_step_without_and_with_prefix_caching():
    steps = [
        {"sequences": 256, "microseconds": 600.0, "prefix_caching_microseconds": 900.0},
        {"sequences": 1024, "microseconds": 4000.0},  # kept before the second was measured
    ]
    text = tables.host({"steps": steps, "requests": []})
    assert "| 256 | 600 | 900 |" in text and "| 1,024 | 4,000 | - |" in text


def test_a_hosts_step_is_measured_with_prefixes_of_their_own(monkeypatch):
    made = []

    class Watched(Policy):
        def __init__(self, name, memory, **options):
            super().__init__(name, memory, **options)
            made.append(memory)

    monkeypatch.setattr(own_experiments, "Policy", Watched)
    assert all(own_experiments._step_microseconds(4, prefix_caching=caching) > 0 for caching in (False, True))
    without, cached = made
    assert not without.prefix_caching and cached.prefix_caching
    assert cached.report().saving == 0, "no block is shared"

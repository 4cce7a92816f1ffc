"""Experiments of the serving simulation: the host's cost, fits to a real engine, and what a batch is charged for."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from jpaged.benchmarks.serving_sim import (
    curves,
    hybrid_experiments,
    own_experiments,
    paged_experiments,
    paged_sections,
    tables,
)
from jpaged.benchmarks.serving_sim.curves import LEAST, LIMIT, Curve, Setting, run_at
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE, Engine
from jpaged.benchmarks.serving_sim.models import OPT_13B
from jpaged.benchmarks.serving_sim.own_experiments import _fit
from jpaged.benchmarks.serving_sim.paged_experiments import Context
from jpaged.benchmarks.serving_sim.policies import FASTER, ORACLE, PAGED, build
from jpaged.benchmarks.serving_sim.policy import Policy
from jpaged.benchmarks.serving_sim.simulation import simulate
from jpaged.benchmarks.serving_sim.workload import Ask, Workload, shared

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


def test_a_rate_that_few_requests_stand_behind_is_asked_with_other_seeds(monkeypatch):
    def made(setting, system):
        rate = {PAGED: 40.0, FASTER: 8.0}[system] + 0.1 * setting.seed
        return Curve(system, ((rate, LIMIT), (2 * rate, 2 * LIMIT)))

    monkeypatch.setattr(paged_experiments, "CHECKED", 400)
    monkeypatch.setattr(curves, "curve", made)
    monkeypatch.setattr(paged_experiments, "curve", made)
    context = Context({"ShareGPT": SMALL}, 10.0, 3, lambda said: None)
    setting = context.setting(OPT_13B, "ShareGPT", 4.0)
    systems = paged_experiments._curves(context, setting, (PAGED, FASTER), checks_seeds=True)["systems"]
    assert "seeds" not in systems[PAGED] and systems[PAGED]["requests"] > 400
    assert LEAST <= systems[FASTER]["requests"] < 400
    assert systems[FASTER]["seeds"] == pytest.approx([8.3, 8.4, 8.5, 8.6, 8.7])
    assert "seeds" not in paged_experiments._curves(context, setting, (FASTER,))["systems"][FASTER]


def test_what_other_seeds_say_is_told_with_jpageds_multiples():
    row = {"name": "OPT-13B, ShareGPT", "systems": {PAGED: {"sustained": 2.0}, FASTER: {"sustained": 0.2}}}
    assert paged_sections.by_seed([row]) == ""
    row["systems"][FASTER]["seeds"] = [0.2, 0.1, 0.3]
    said = paged_sections.by_seed([row])
    assert (
        "  - FasterTransformer, OPT-13B, ShareGPT: 0.1 to 0.3, 0.2 on the average, of which jpaged's 2 is 10.0 times "
        "(6.7 to 20.0).\n"
    ) in said
    row["systems"][FASTER]["seeds"] = [0.2, 0.0, 0.3]
    assert "ShareGPT: none by one of them, 0.3 at the most.\n" in paged_sections.by_seed([row])


def test_savings_of_a_rate_at_which_few_come_are_looked_at_after_the_warm_up_of_the_longer_run(monkeypatch):
    monkeypatch.setattr(paged_experiments, "SAVING_AT", {"ShareGPT": 2.0})
    monkeypatch.setattr(paged_experiments, "DECODINGS", ((2, False),))
    monkeypatch.setattr(paged_experiments, "SAMPLE_EVERY", 1)
    clocks, simulated = [], paged_experiments.simulate

    def simulate(policy, machine, asks, *, watch, **more):
        def look(policy, step, clock):
            before = len(watch.__defaults__[0])
            watch(policy, step, clock)
            clocks.extend([clock] * (len(watch.__defaults__[0]) - before))

        return simulated(policy, machine, asks, watch=look, **more)

    monkeypatch.setattr(paged_experiments, "simulate", simulate)
    (row,) = paged_experiments.savings(Context({"ShareGPT": SMALL}, 10.0, 0, lambda said: None))
    assert row["requests"] == LEAST and min(clocks) >= 0.2 * LEAST / 2.0


def test_first_tokens_are_compared_over_rates_in_runs_of_one_time(monkeypatch):
    asked = []

    def serve(case, system, asks, **more):
        asked.append((len(asks), system))
        return simulate(build(PAGED, OPT_13B), OPT_13B.machine(PAPER_ENGINE), [Ask(0.0, 20, 4)])

    monkeypatch.setattr(hybrid_experiments, "RATES", {"Ministral-8B": (0.05, 0.1)})
    monkeypatch.setattr(hybrid_experiments, "_serve", serve)
    lengths = Workload("long", ((70_000, 100), (80_000, 50)))
    rows = hybrid_experiments.load(Context({"Mooncake": lengths}, 500.0, 0, lambda said: None))
    assert [number for number, _ in asked] == [LEAST, LEAST, 2 * LEAST, 2 * LEAST]
    assert {row["seconds"] for row in rows} == {LEAST / 0.05}


@pytest.mark.parametrize("system", [PAGED, ORACLE])
def test_prompts_in_steps_of_their_own_read_the_weights_once_more(system):
    asks = [Ask(0.0, 100, 30), Ask(0.5, 200, 20)]
    machine = OPT_13B.machine(PAPER_ENGINE)
    together, apart = (
        simulate(build(system, OPT_13B), each, asks).seconds for each in (machine, replace(machine, prompts_apart=True))
    )
    assert apart - together == pytest.approx(machine.decode_seconds(1, 0.0) - PAPER_ENGINE.sequence_seconds, rel=0.2)


def test_a_prefix_that_is_read_once_costs_the_bandwidth_of_one_sequence():
    machine, prefix = OPT_13B.machine(Engine(1.0)), 320
    once = replace(machine, read_once=prefix)
    read = 8 * machine.kv_bytes(400)
    saved = machine.decode_seconds(8, read) - once.decode_seconds(8, read)
    assert saved == pytest.approx(7 * machine.kv_bytes(prefix) / machine.speed.bandwidth)
    assert machine.decode_seconds(1, 0.0) == once.decode_seconds(1, 0.0)
    asks = shared([Ask(0.0, 20, 2), *[Ask(1.0, 20, 40)] * 8], range(prefix))
    every, fewer = (
        simulate(build(PAGED, OPT_13B, prefix_caching=True), each, asks).seconds for each in (machine, once)
    )
    assert every - fewer == pytest.approx(40 * saved, rel=0.05)


def test_only_jpageds_sequences_read_a_prefix_once():
    setting = Setting(OPT_13B, SMALL, PAPER_ENGINE, 20.0, 0, 1.0, prefix=320)
    for system, differs in ((PAGED, True), (ORACLE, False)):
        latencies = [run_at(replace(setting, reads_once=once), system, 20.0).latency for once in (False, True)]
        assert (latencies[1] < latencies[0]) is differs


def test_causes_of_a_prefixs_ratio_are_measured_alone_and_said_with_what_is_missing(monkeypatch):
    changed = []

    def curves(context, setting, systems):
        mean = setting.workload.mean_output
        changed.append((setting.prefix, mean, setting.prompts_apart, setting.reads_once, setting.seconds))
        rates = {PAGED: 3.0 + setting.reads_once, ORACLE: 1.0}
        return {"systems": {name: {"sustained": rates[name], "is_least": False, "requests": 300} for name in systems}}

    monkeypatch.setattr(paged_experiments, "_curves", curves)
    rows = paged_experiments.prefixes(Context({"WMT16": SMALL}, 500.0, 0, print))
    usual = SMALL.mean_output
    assert [each[1:] for each in changed[:6]] == [
        (usual, False, False, 100.0),
        (2 * usual, False, False, 100.0),
        (4 * usual, False, False, 100.0),
        (usual, True, False, 100.0),
        (usual, False, True, 100.0),
        (usual, True, True, 100.0),
    ]
    assert [each[0] for each in changed[::6]] == [80, 341]
    for row in rows:
        row["seconds"] = 100.0
    text = paged_sections.prefixes(rows)
    assert "| 5-shot | as it is | 100 | 300 | 3.0 | 1.0 | 3.00 | 3.58 |" in text
    assert "| 5-shot | the prefix's KV read once a step | 100 | 300 | 4.0 | 1.0 | 4.00 |  |" in text
    said = "- **5-shot**: 3.00, the paper's 3.58 is +0.58 from it. With outputs twice as long 3.00 (+0.00, 0% of the"
    assert said in text
    assert "the prefix's KV read once a step 4.00 (+1.00, 172% of the difference)" in text
    assert "Alone, *the prefix's KV read once a step* goes furthest towards it." in text
    rows[6]["systems"][ORACLE]["is_least"] = True
    assert "- **5-shot**" not in paged_sections.prefixes(rows), "nothing is said of a ratio that is only bounded"


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

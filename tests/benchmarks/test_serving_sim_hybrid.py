"""The Jenga paper's experiments in simulated time: which requests policies share, and sentences that follow figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jpaged.benchmarks.serving_sim import hybrid_experiments, hybrid_sections, paged_sections
from jpaged.benchmarks.serving_sim.hybrid_experiments import accepted, endless
from jpaged.benchmarks.serving_sim.hybrid_models import LONG, SHORT, Case
from jpaged.benchmarks.serving_sim.hybrid_policies import HYBRID_SYSTEMS, LARGEST
from jpaged.benchmarks.serving_sim.models import Served, shape_named
from jpaged.benchmarks.serving_sim.paged_experiments import Context
from jpaged.benchmarks.serving_sim.policies import ORACLE, PAGED
from jpaged.benchmarks.serving_sim.workload import Ask, Workload

GEMMA = replace(shape_named("Gemma-3-27B"), pool_gib=2.0, max_len=32768)
CASE = Case(Served(GEMMA, 27e9, 27e9, 5376, 62, 2, "h100"), LONG, (0.18, 0.25))


def test_a_policy_accepts_what_fits_its_empty_pool():
    asks = [Ask(0.0, 500, 20), Ask(0.0, 6000, 20), Ask(0.0, 500, 20)]
    assert accepted(CASE, PAGED, asks, 2000) == [True, True, True]
    assert accepted(CASE, LARGEST, asks, 2000) == [True, False, True]


def test_all_policies_of_a_row_serve_the_requests_that_each_of_them_can_hold(monkeypatch):
    monkeypatch.setattr(hybrid_experiments, "CASES", (CASE,))
    monkeypatch.setattr(hybrid_experiments, "BINDING", ())
    monkeypatch.setitem(hybrid_experiments.NUMBERS, LONG, 12)
    served = {}

    def serve(case, system, asks, **more):
        served.setdefault(system, []).append(asks)
        return whole(case, system, asks, **more)

    whole = hybrid_experiments._serve
    monkeypatch.setattr(hybrid_experiments, "_serve", serve)
    mooncake = Workload("Mooncake", ((500, 20), (6000, 20), (700, 30)))
    row = hybrid_experiments.throughput(Context({"Mooncake": mooncake}, 10.0, 0, lambda text: None))[0]
    assert 0 < row["requests"] < row["sent"] == 12
    assert row["systems"][LARGEST]["refused"] == row["sent"] - row["requests"]
    assert row["systems"][PAGED]["refused"] == 0
    same = served[PAGED][0]
    assert len(same) == row["requests"] and all(served[system][0] == same for system in HYBRID_SYSTEMS)
    text = hybrid_sections.throughput([row])
    assert f"of Gemma-3-27B with 2 GiB and 12 requests {LARGEST} {12 - row['requests']}" in text
    assert f"| {row['requests']} of 12 long |" in text


def test_an_endless_pool_holds_all_requests_at_once():
    asks = [Ask(0.0, 4000, 60)] * 12
    free = endless(GEMMA, asks)
    assert free.pool_gib > GEMMA.pool_gib
    most, more = (
        hybrid_experiments._serve(replace(CASE, served=replace(CASE.served, shape=shape)), PAGED, asks)
        for shape in (free, replace(free, pool_gib=4 * free.pool_gib))
    )
    assert most.throughput == pytest.approx(more.throughput) and not most.preemptions
    assert endless(GEMMA, asks[:1]).pool_gib == GEMMA.pool_gib, "never smaller than the pool itself"


def row_of(model, pool, mine, other, free, batches=(4.0, 2.0), refused=0):
    one = {"refused": 0, "preemptions": 0}
    systems = {name: one | {"throughput": mine, "decode_batch": batches[0]} for name in HYBRID_SYSTEMS}
    systems[LARGEST] = one | {"throughput": other, "decode_batch": batches[1], "refused": refused}
    free = {"throughput": free, "decode_batch": 1.0}
    row = {"model": model, "asked": SHORT, "paper": (1.0, 1.5), "systems": systems, "pool": pool, "endless": free}
    return row | {"sent": 40, "requests": 40 - refused}


def test_sentences_on_memory_follow_from_the_figures():
    rows = [
        row_of("Ministral-8B", 52, 0.2, 0.18, 0.22),
        row_of("Ministral-8B", 36, 0.18, 0.16, 0.22, (4.0, 1.6)),
        row_of("PyramidKV on Llama-3.1-70B", 5, 0.5, 0.4, 0.6, (3.0, 4.0)),
        row_of("character.ai-like, 70B", 5, 0.5, 0.4, 0.51),
    ]
    text = " ".join(hybrid_sections.throughput(rows).split())
    assert "None was refused." in text
    free = "jpaged's pool that hardly binds, and the largest page may still lose by its own:"
    assert f"{free} character.ai-like, 70B with 5 GiB." in text
    assert "PyramidKV on Llama-3.1-70B with 5 GiB would serve 20% more" in text
    assert "grows 2.00 times with 52 GiB and 2.50 times with 36 GiB, the paper's 2.16 times" in text
    assert "is the smaller one with PyramidKV on Llama-3.1-70B with 5 GiB (0.75)" in text
    assert "takes 1.60 times the bytes, 37.5% of which are wasted" in text
    free = " ".join(hybrid_sections.throughput(rows[:2]).split())
    assert "jpaged's pool binds in every row." in free and "smaller one" not in free


def test_what_waits_for_a_full_pool_is_told_by_model_and_rate():
    rows = [
        {"model": "m", "rate": rate, "system": system, "requests": 30, "ttft": ttft, "tpot": 0.01}
        for rate, mine, other in ((1.0, 2.0, 2.1), (2.0, 2.0, 5.0))
        for system, ttft in ((PAGED, mine), (LARGEST, other))
    ]
    assert "m (2.5 times at 2/s)" in hybrid_sections.load(rows)
    assert "jpaged's: none." in hybrid_sections.load(rows[:2])


def test_a_ratio_is_told_to_be_on_the_side_of_the_papers_on_which_it_is():
    one = {"points": [], "is_least": False, "requests": 9}
    rows = [
        {"shots": shots, "prefix": 80, "held": [70.0, 256.0], "name": "x", "seconds": 9, "change": "as it is"}
        | {"systems": {PAGED: one | {"sustained": mine}, ORACLE: one | {"sustained": 10.0}}}
        for shots, mine in ((1, 19.0), (5, 30.0))
    ]
    text = " ".join(paged_sections.prefixes(rows).split())
    assert "**1-shot**: 1.90, the paper's 1.67 is -0.23 from it" in text
    assert "**5-shot**: 3.00, the paper's 3.58 is +0.58 from it" in text
    assert "with 80 tokens of prefix 70 tokens of its own and a region of 256" in text


def test_the_best_block_sizes_and_longer_runs_are_told_from_the_figures():
    sizes = [
        {"workload": "ShareGPT", "rate": 2.5, "requests": 9, "size": size, "latency": latency, "preemptions": 3}
        for size, latency in ((1, 0.1), (16, 0.101), (256, 0.3))
    ]
    assert "the best: 1, 16 on ShareGPT." in " ".join(paged_sections.block_sizes(sizes).split())
    runs = [
        {"workload": "ShareGPT", "rate": 2.0, "seconds": seconds, "requests": 9, "batch": batch, "latency": 0.05}
        for seconds, batch in ((120.0, 25.0), (600.0, 30.0), (3600.0, 33.0))
    ]
    assert "the batch is +10% and the latency 0% in 3600 s" in paged_sections.durations(runs, 600.0)

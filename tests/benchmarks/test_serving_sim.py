"""The serving simulation: its clock, its arrivals, its curves, and the page made of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from jpaged.benchmarks.serving_sim import tables
from jpaged.benchmarks.serving_sim.beams import MadeUpRankings, copied_share
from jpaged.benchmarks.serving_sim.curves import LIMIT, Curve, Setting, curve
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE, ROOFLINE, Engine
from jpaged.benchmarks.serving_sim.models import OPT_13B, OPT_66B, read_bytes, shape_named
from jpaged.benchmarks.serving_sim.own_experiments import _fit
from jpaged.benchmarks.serving_sim.paged_experiments import Context
from jpaged.benchmarks.serving_sim.policies import FASTER, ORACLE, PAGED, build
from jpaged.benchmarks.serving_sim.run import EXPERIMENTS, run
from jpaged.benchmarks.serving_sim.simulation import simulate
from jpaged.benchmarks.serving_sim.workload import Ask, Workload, alpaca, shared, sharegpt
from jpaged.cli.main import app
from jpaged.planning.devices import find_device

SMALL = Workload("small", ((20, 12), (60, 30), (8, 50)))


def test_a_request_alone_takes_the_rooflines_time():
    outcome = simulate(build(PAGED, OPT_13B), OPT_13B.machine(ROOFLINE), [Ask(1.0, 100, 3)])
    chip = find_device("a100-40gb").chip
    weights, token = 26e9 / chip.bandwidth, OPT_13B.token_bytes / chip.bandwidth
    steps = (weights + 100 * token, weights + 100 * token, weights + 101 * token)
    (job,) = outcome.jobs
    assert job.finished == pytest.approx(1.0 + sum(steps))
    assert job.first_token == pytest.approx(1.0 + steps[0])
    assert outcome.latency == pytest.approx(sum(steps) / 3)
    assert outcome.token_seconds == pytest.approx((steps[1] + steps[2]) / 2)


def test_an_engine_attains_a_share_and_takes_the_hosts_time():
    asks = [Ask(0.0, 100, 3)] * 2
    best = simulate(build(PAGED, OPT_13B), OPT_13B.machine(ROOFLINE), asks).seconds
    half = simulate(build(PAGED, OPT_13B), OPT_13B.machine(Engine(0.5, 1e-3, 1e-2)), asks).seconds
    assert half == pytest.approx(2 * best + 3 * 2e-3 + 3e-2)


def test_several_devices_share_bytes_and_pay_for_sums():
    seconds = simulate(build(PAGED, OPT_66B), OPT_66B.machine(ROOFLINE), [Ask(0.0, 1, 2)]).seconds
    alone = 2 * 132e9 / 4 / find_device("a100-40gb").chip.bandwidth
    assert alone < seconds < 1.1 * alone


def test_what_the_next_token_reads_is_interpolated_between_exact_lengths():
    shape = shape_named("Gemma-3-27B")
    read = read_bytes(shape, 2)
    for length in (0, 64, 640, 1000, 1024, 5000, 50_000):
        assert read(length) == pytest.approx(shape.needed_bytes(length) / 2, rel=0.01)


def test_arrivals_are_seeded_and_poisson():
    some, more = SMALL.arrivals(5.0, 4000, 1), SMALL.arrivals(10.0, 4000, 1)
    assert some == SMALL.arrivals(5.0, 4000, 1) != SMALL.arrivals(5.0, 4000, 2)
    assert [ask.output for ask in some] == [ask.output for ask in more], "the same requests at any rate"
    gaps = np.diff([ask.arrival for ask in some])
    assert gaps.mean() == pytest.approx(0.2, rel=0.1) and gaps.std() == pytest.approx(0.2, rel=0.1)


def test_preempted_requests_end_too_by_either_way_of_return():
    asks = [Ask(0.0, 400, 500)] * 30
    for mode in ("recompute", "swap"):
        space = {"swap_space_bytes": 8 << 30} if mode == "swap" else {}
        policy = build(PAGED, OPT_13B, preemption_mode=mode, **space)
        outcome = simulate(policy, OPT_13B.machine(PAPER_ENGINE), asks)
        assert outcome.preemptions and len(outcome.jobs) == 30


def test_a_run_that_falls_behind_is_given_up():
    asks = SMALL.arrivals(1e6, 500, 0)
    outcome = simulate(build(FASTER, OPT_13B), OPT_13B.machine(PAPER_ENGINE), asks, most_waiting=100)
    assert outcome.gave_up == (not math.isfinite(outcome.latency))
    slow = simulate(build(ORACLE, OPT_13B), OPT_13B.machine(PAPER_ENGINE), asks, most_waiting=100)
    assert slow.gave_up and slow.latency == math.inf


def test_the_sustained_rate_lies_where_the_latency_crosses_the_limit():
    made = Curve(PAGED, ((1.0, LIMIT / 4), (2.0, LIMIT / 2), (8.0, LIMIT * 2)))
    assert made.sustained() == pytest.approx(4.0)
    assert Curve(PAGED, ((1.0, LIMIT * 2),)).sustained() == 0.0


def test_a_curve_is_searched_upwards_and_downwards():
    tries = [Setting(OPT_13B, SMALL, PAPER_ENGINE, 30.0, 0, first, most_requests=300) for first in (2.0, 64.0)]
    up, down = (curve(setting, FASTER).sustained() for setting in tries)
    assert 0 < up == pytest.approx(down, rel=0.25)


def test_beams_share_blocks_and_their_search_ends():
    policy, seen = build(PAGED, OPT_13B), []
    asks = [Ask(0.0, 40, 30, n=4, beams=True)] * 2
    outcome = simulate(
        policy,
        OPT_13B.machine(PAPER_ENGINE),
        asks,
        watch=lambda p, step, clock: seen.append(p.memory.report().saving),
        rankings=MadeUpRankings(0),
    )
    assert len(outcome.jobs) == 2 and max(seen) > 0.4
    assert 0 < copied_share(4) < copied_share(4, gap=1.0) < 0.75


def test_a_shared_prefix_is_found_in_the_cache():
    asks = shared([Ask(0.0, 20, 4), Ask(1.0, 20, 4)], range(64))
    policy, computed = build(PAGED, OPT_13B, prefix_caching=True), []
    simulate(
        policy,
        OPT_13B.machine(PAPER_ENGINE),
        asks,
        watch=lambda p, step, clock: computed.extend(c.length for c in step.chunks if c.length > 1),
    )
    assert computed == [84, 20]


def test_shipped_lengths_are_filtered_and_alpacas_prompts_keep_their_answers(tmp_path):
    found = sharegpt()
    assert len(found.pairs) > 4000
    assert all(4 <= p <= 1024 and o >= 4 and p + o <= 2048 for p, o in found.pairs)
    rows = [{"prompt": "a b", "output": "c"}, {"prompt": "d", "output": "e f g"}]
    (tmp_path / "alpaca-2k.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert alpaca(tmp_path, lambda text: len(text.split())).pairs == ((3, 1), (2, 3))
    with pytest.raises(ValueError, match=r"no alpaca\*\.jsonl"):
        alpaca(tmp_path / "other", len)


def test_a_fit_finds_the_factors_and_none_of_them_is_negative():
    rng = np.random.default_rng(0)
    parts = rng.uniform(1, 2, (5, 3))
    assert _fit(parts, parts @ [2.0, 0.5, 0.1]) == pytest.approx([2.0, 0.5, 0.1])
    clipped = _fit(parts, parts @ [2.0, -0.2, 0.1])
    assert clipped[1] == 0.0 and min(clipped) >= 0


def test_results_are_kept_and_not_run_again(tmp_path):
    said = []
    context = Context({"ShareGPT": SMALL}, 5.0, 0, said.append)
    kept = tmp_path / "results.json"
    first = run(["batches"], context, kept)
    assert said and first["batches"][0]["batch"][PAGED] > 0
    said.clear()
    assert run(["batches"], context, kept) == first and not said
    with pytest.raises(ValueError, match="--only several needs the workload Alpaca"):
        run(["several"], context, None)


def test_the_page_is_written_with_the_papers_numbers_beside_it(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("jpaged.benchmarks.serving_sim.workload.count_tokens", lambda: len)
    found = {PAGED: {"points": [[1.0, 0.1], [2.0, 0.3]], "sustained": 2.0}}
    found |= {name: {"points": [[0.5, 0.3]], "sustained": 0.5} for name in (ORACLE, FASTER)}
    systems = {PAGED: {"points": [[1, 0.1]], "sustained": 6.0}, ORACLE: {"points": [[1, 0.1]], "sustained": 3.0}}
    results = {
        "load": [{"name": "OPT-13B, ShareGPT", "systems": found}],
        "batches": [{"workload": "ShareGPT", "rate": 2.0, "batch": {PAGED: 28.0, ORACLE: 15.0}}],
        "prefixes": [{"shots": 5, "name": "x", "systems": systems}],
        "savings": [{"workload": "Alpaca", "n": 2, "beams": True, "saving": 0.4}],
    }
    kept = tmp_path / "results.json"
    kept.write_text(json.dumps(results), encoding="utf-8")
    only = [part for name in results for part in ("--only", name)]
    arguments = ["bench", "serving-sim", *only, "--results", str(kept), "--docs", str(tmp_path)]
    wmt = tmp_path / "wmt16.jsonl"
    wmt.write_text(json.dumps({"en": "a", "de": "b"}), encoding="utf-8")
    refused = CliRunner().invoke(app, ["bench", "serving-sim", "--only", "none"])
    assert refused.exit_code == 2 and "load" in refused.output
    done = CliRunner().invoke(app, [*arguments, "--workloads", str(tmp_path)])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "serving-sim.md").read_text(encoding="utf-8")
    for row in ("| 2.00 | 0.50 | 0.50 | 4.00 | 4.00 |", "| 28.00 | 30.42 |", "| 2.00 | 3.58 |", "| 40.0 % | 37.56 % |"):
        assert row in text
    for kind in ("png", "svg"):
        assert (tmp_path / f"serving-sim.{kind}").stat().st_size > 1000


def test_every_experiment_has_a_section():
    from jpaged.benchmarks.serving_sim import page

    source = page.page.__code__.co_consts
    names = {name for const in source if isinstance(const, tuple) for name in const} | set(map(str, source))
    assert set(EXPERIMENTS) <= names
    assert tables.table(["a"], [["b"]]) == "| a |\n| --- |\n| b |"

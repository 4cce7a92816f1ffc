"""The serving simulation: its clock, its arrivals, its curves, and the page made of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from jpaged.benchmarks.serving_sim import curves, tables
from jpaged.benchmarks.serving_sim.beams import MadeUpRankings, copied_share
from jpaged.benchmarks.serving_sim.curves import HIGHEST, LEAST, LIMIT, Curve, Setting, curve, run_at
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE, ROOFLINE, Engine
from jpaged.benchmarks.serving_sim.models import OPT_13B, OPT_66B, read_bytes, shape_named
from jpaged.benchmarks.serving_sim.paged_experiments import Context
from jpaged.benchmarks.serving_sim.policies import FASTER, ORACLE, PAGED, build
from jpaged.benchmarks.serving_sim.policy import Job
from jpaged.benchmarks.serving_sim.run import EXPERIMENTS, run, settings, workloads
from jpaged.benchmarks.serving_sim.simulation import Outcome, simulate
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


def test_more_requests_begin_with_those_that_fewer_are():
    few, many = SMALL.arrivals(5.0, 100, 1), SMALL.arrivals(5.0, 1000, 1)
    assert many[:100] == few
    faster = SMALL.arrivals(10.0, 1000, 1)
    assert [2 * ask.arrival for ask in faster] == pytest.approx([ask.arrival for ask in many])


def test_preempted_requests_end_too_by_either_way_of_return():
    asks = [Ask(0.0, 400, 500)] * 30
    for mode in ("recompute", "swap"):
        space = {"swap_space_bytes": 8 << 30} if mode == "swap" else {}
        policy = build(PAGED, OPT_13B, preemption_mode=mode, **space)
        outcome = simulate(policy, OPT_13B.machine(PAPER_ENGINE), asks)
        assert outcome.preemptions and len(outcome.jobs) == 30


def test_a_run_that_falls_behind_is_given_up():
    asks = SMALL.arrivals(1e6, 500, 0)
    for system in (FASTER, ORACLE):  # the first keeps a queue of its own before the scheduler's
        slow = simulate(build(system, OPT_13B), OPT_13B.machine(PAPER_ENGINE), asks, most_waiting=100)
        assert slow.gave_up and slow.latency == math.inf, system
        kept_up = simulate(build(system, OPT_13B), OPT_13B.machine(PAPER_ENGINE), asks, most_waiting=500)
        assert not kept_up.gave_up and len(kept_up.jobs) == 500, system


def test_the_sustained_rate_lies_where_the_latency_crosses_the_limit():
    made = Curve(PAGED, ((1.0, LIMIT / 4), (2.0, LIMIT / 2), (8.0, LIMIT * 2)))
    assert made.sustained() == pytest.approx(4.0)
    assert Curve(PAGED, ((1.0, LIMIT * 2),)).sustained() == 0.0


def test_a_curve_is_searched_upwards_and_downwards():
    tries = [Setting(OPT_13B, SMALL, PAPER_ENGINE, 20.0, 0, first) for first in (2.0, 64.0)]
    up, down = (curve(setting, FASTER).sustained() for setting in tries)
    assert 0 < up == pytest.approx(down, rel=0.25)


def test_a_curve_without_an_upper_end_stops_at_the_highest_rate_and_says_that_it_is_a_least_one(monkeypatch):
    tried = []

    def always_fast(setting, system, rate):
        tried.append(rate)
        return Outcome(system, [Job(Ask(0.0, 1, 1), finished=LIMIT / 2)], 1.0, 1.0, 1.0, 1, 0, 0)

    monkeypatch.setattr(curves, "run_at", always_fast)
    found = curve(Setting(OPT_13B, SMALL, PAPER_ENGINE, 10.0, 0, 2.0), PAGED)
    assert max(tried) == found.sustained() == 2.0 * HIGHEST and found.is_least()
    row = {"name": "x", "seconds": 1000.0, "systems": {}}
    for name, rate, is_least in ((PAGED, 4.0, True), (ORACLE, 2.0, False), (FASTER, 8.0, True)):
        row["systems"][name] = {"sustained": rate, "is_least": is_least, "points": [], "requests": int(1000 * rate)}
    assert "| 1,000 | 2,000 to 8,000 | at least 4.00 | 2.00 | at least 8.00 | at least 2.00 | - |" in tables.rates(
        [row]
    )


def test_where_no_request_ends_the_latency_is_infinite_and_no_rate_is_sustained():
    too_long = Workload("too long", ((3000, 10),))
    outcome = simulate(build(PAGED, OPT_13B), OPT_13B.machine(PAPER_ENGINE), [])
    assert outcome.latency == outcome.first_token == math.inf
    setting = Setting(OPT_13B, too_long, PAPER_ENGINE, 10.0, 0, 1.0)
    assert run_at(setting, ORACLE, 1.0).latency == math.inf
    assert curve(setting, ORACLE).sustained() == 0.0


def test_who_comes_while_a_run_warms_up_is_served_and_not_counted():
    asks = [Ask(float(second), 20, 50) for second in range(10)]
    machine = OPT_13B.machine(PAPER_ENGINE)
    every, late = (simulate(build(PAGED, OPT_13B), machine, asks, warm_up=share) for share in (0.0, 0.5))
    assert [job.ask.arrival for job in late.jobs] == [5.0, 6.0, 7.0, 8.0, 9.0] and len(every.jobs) == 10
    assert late.seconds == pytest.approx(every.seconds - 4.5) and late.steps == every.steps
    ramp = [Ask(0.0, 20, 50), *(Ask(10.0, 20, 50) for _ in range(8)), Ask(11.0, 20, 50)]
    whole, end = (simulate(build(PAGED, OPT_13B), machine, ramp, warm_up=share).batch for share in (0.0, 0.9))
    assert end > 4 > whole


def test_all_rates_and_policies_of_a_page_get_requests_for_the_same_time():
    context = Context({"ShareGPT": SMALL}, 40.0, 0, print)
    one, six = context.setting(OPT_13B, "ShareGPT", 1.0), context.setting(OPT_13B, "ShareGPT", 1.0, n=6)
    assert [one.number(rate) for rate in (0.01, 0.5, 10.0)] == [2, 20, 400]
    assert six.number(10.0) == context.number(10.0) == 400
    assert context.number(0.5) == LEAST, "a run at one rate, which no other is compared with, is as much longer"


def sustaining(rates, monkeypatch):
    """Let systems sustain rates that fall as runs become longer; return the runs (system, seconds) that are made."""
    runs = []

    def made(setting, system):
        runs.append((system, setting.seconds))
        rate = rates[system] * (1 + 100 / setting.seconds)
        return Curve(system, ((rate, LIMIT), (2 * rate, 2 * LIMIT)))

    monkeypatch.setattr(curves, "curve", made)
    return runs


def test_runs_of_a_row_are_so_long_that_no_sustained_rate_rests_on_few_requests(monkeypatch):
    runs = sustaining({PAGED: 3.0, ORACLE: 0.5, FASTER: 0.04}, monkeypatch)
    setting = Setting(OPT_13B, SMALL, PAPER_ENGINE, 500.0, 0, 1.0)
    longer, found = curves.compare(setting, (PAGED, ORACLE, FASTER))
    assert list(found) == [PAGED, ORACLE, FASTER] and longer.seconds > 4000
    assert {runs[-1 - i][1] for i in range(3)} == {longer.seconds}, "all runs of a row last equally long"
    assert [longer.number(its.sustained()) >= LEAST for its in found.values()] == [True] * 3
    lengths = list(dict.fromkeys(seconds for _, seconds in runs))
    assert lengths[:3] == [500.0, 1000.0, 2000.0], "longer by steps, as rates of few requests are not to be trusted"
    assert longer.seconds % 100 == 0 and LEAST / longer.seconds > 0.9 * found[FASTER].sustained(), "and no longer"


def test_runs_that_have_enough_requests_are_as_long_as_was_asked_for(monkeypatch):
    runs = sustaining({PAGED: 3.0, ORACLE: 0.5}, monkeypatch)
    same, _ = curves.compare(Setting(OPT_13B, SMALL, PAPER_ENGINE, 500.0, 0, 1.0), (PAGED, ORACLE))
    assert same.seconds == 500.0 and runs == [(ORACLE, 500.0), (PAGED, 500.0)]


def test_a_policy_that_refuses_a_request_is_not_rewarded_for_it():
    asks = [Ask(0.0, 20, 4), Ask(0.0, 3000, 10)]
    outcome = simulate(build(ORACLE, OPT_13B), OPT_13B.machine(PAPER_ENGINE), asks)
    assert outcome.refused == 1 and len(outcome.jobs) == 1 and outcome.latency == math.inf


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


def test_results_of_other_settings_are_refused(tmp_path):
    kept = tmp_path / "results.json"
    run(["batches"], Context({"ShareGPT": SMALL}, 5.0, 0, print), kept)
    before = kept.read_text()
    for other in (Context({"ShareGPT": SMALL}, 5.0, 1, print), Context({"ShareGPT": SMALL}, 6.0, 0, print)):
        with pytest.raises(ValueError, match=r"was measured with (seed 0, not 1|seconds 5.0, not 6.0)"):
            run(["batches"], other, kept)
    longer = Workload("small", (*SMALL.pairs, (9, 9)))
    with pytest.raises(ValueError, match="was measured with workloads"):
        run(["batches"], Context({"ShareGPT": longer}, 5.0, 0, print), kept)
    assert kept.read_text() == before


def test_results_of_requests_that_were_drawn_otherwise_are_refused(tmp_path):
    kept, context = tmp_path / "results.json", Context({"ShareGPT": SMALL}, 5.0, 0, print)
    before = {name: value for name, value in settings(context).items() if name != "drawn"}
    kept.write_text(json.dumps({"settings": before, "parts": {}}), encoding="utf-8")
    with pytest.raises(ValueError, match="was measured with drawn None, not lengths and gaps apart"):
        run(["batches"], context, kept)


def test_a_million_requests_are_run_when_asked_for_although_fewer_are_kept(tmp_path, monkeypatch):
    asked = []

    def host_cost(context):
        asked.append(context.million)
        return {"million": context.million}

    monkeypatch.setitem(EXPERIMENTS, "host", ("ShareGPT", host_cost))
    kept = tmp_path / "results.json"
    for million in (False, False, True, True, False):
        run(["host"], Context({"ShareGPT": SMALL}, 5.0, 0, print, million), kept)
    assert asked == [False, True]


def test_the_page_is_written_with_the_papers_numbers_beside_it(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("jpaged.benchmarks.serving_sim.workload.count_tokens", lambda: len)
    found = {PAGED: {"points": [[1.0, 0.1], [2.0, 0.3]], "sustained": 2.0, "is_least": False, "requests": 1200}}
    slow = {"points": [[0.5, 0.3]], "sustained": 0.5, "is_least": False, "requests": 300, "seeds": [0.5, 0.4, 0.6]}
    found |= dict.fromkeys((ORACLE, FASTER), slow)
    one = {"points": [[1, 0.1]], "is_least": False, "requests": 60}
    systems = {PAGED: one | {"sustained": 6.0}, ORACLE: one | {"sustained": 3.0}}
    results = {
        "load": [{"name": "OPT-13B, ShareGPT", "seconds": 600.0, "systems": found}],
        "batches": [
            {"workload": "ShareGPT", "rate": 2.0, "requests": 1200, "batch": {PAGED: 28.0, ORACLE: 15.0}},
        ],
        "prefixes": [
            {"shots": 5, "prefix": 341, "held": [80, 512], "change": "as it is", "seconds": 300.0, "systems": systems}
        ],
        "savings": [{"workload": "Alpaca", "rate": 4.0, "requests": 90, "n": 2, "beams": True, "saving": 0.4}],
    }
    only = [part for name in results for part in ("--only", name)]
    wmt = tmp_path / "wmt16.jsonl"
    wmt.write_text(json.dumps({"en": "a", "de": "b"}), encoding="utf-8")
    known = workloads(tmp_path, lambda: len)
    kept = tmp_path / "results.json"
    its = settings(Context(known, 300.0, 3, print))
    kept.write_text(json.dumps({"settings": its, "parts": results}), encoding="utf-8")
    arguments = ["bench", "serving-sim", *only, "--results", str(kept), "--docs", str(tmp_path)]
    arguments += ["--seconds", "300", "--seed", "3"]
    refused = CliRunner().invoke(app, ["bench", "serving-sim", "--only", "none"])
    assert refused.exit_code == 2 and "load" in refused.output
    done = CliRunner().invoke(app, [*arguments, "--workloads", str(tmp_path)])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "serving-sim.md").read_text(encoding="utf-8")
    for row in ("| 2.00 | 0.50 | 0.50 | 4.00 | 4.00 |", "| 28.00 | 30.42 |", "| 2.00 | 3.58 |", "| 40.0 % | 37.56 % |"):
        assert row in text
    assert f"--workloads {tmp_path.name} --seconds 300 --seed 3 --docs docs`" in text
    assert "-8% on ShareGPT" in text and "**5-shot**: 2.00, the paper's 3.58 is +1.58 from it" in text
    assert "| 600 | 300 to 1,200 |" in text and "| 300 | 60 |" in text
    assert "Requests come for 300 s in every run" in text and f"Where less than {LEAST} would come in that time" in text
    assert "Orca (Oracle), OPT-13B, ShareGPT: 0.4 to 0.6, 0.5 on the average, of which jpaged's 2 is 4.0 times" in text
    for kind in ("png", "svg"):
        assert (tmp_path / f"serving-sim.{kind}").stat().st_size > 1000


def test_every_experiment_has_a_section():
    from jpaged.benchmarks.serving_sim import page

    assert set(page.sections((1.0, 1.0), 1.0)) == set(EXPERIMENTS)
    assert tables.table(["a"], [["b"]]) == "| a |\n| --- |\n| b |"

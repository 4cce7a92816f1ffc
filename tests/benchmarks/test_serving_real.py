"""Serving over time on the real engine: what is asked, what a run gave, and the page made of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from jpaged.benchmarks.serving_answer import Answer
from jpaged.benchmarks.serving_load import arrival_times
from jpaged.benchmarks.serving_real import tables
from jpaged.benchmarks.serving_real.experiments import Bench, Plan, curve, finite, load
from jpaged.benchmarks.serving_real.host import RANDOM
from jpaged.benchmarks.serving_real.measures import figure, latency, measured, over_seeds
from jpaged.benchmarks.serving_real.page import page
from jpaged.benchmarks.serving_real.policies import POLICIES
from jpaged.benchmarks.serving_real.verdicts import DEFAULT, against_lru, ahead
from jpaged.benchmarks.serving_real.workload import KINDS, SHARING, Caps, Task, arrange, read_texts, within
from jpaged.benchmarks.serving_report import Limits
from jpaged.benchmarks.serving_sim.hybrid_policies import LARGEST
from jpaged.benchmarks.serving_sim.policies import FASTER, MAX, ORACLE, PAGED
from jpaged.cli.main import app
from jpaged.cli.page_command import page_command

CAPS = Caps(200, 60)


def encode(text: str) -> list[int]:
    return list(text.encode())


def shipped():
    return read_texts(None, encode, CAPS)


def written(folder):
    rows = {
        "alpaca-x.jsonl": [{"prompt": "Say it.", "output": "It is said."}],
        "rag-nq-x.jsonl": [
            {"question": f"what is {n}", "title": f"Title {n}", "text": f"Document {n} " * 9} for n in range(20)
        ],
        "humaneval-x.jsonl": [{"prompt": "def f():\n", "canonical_solution": "    return 1\n"}],
        "mtbench-x.jsonl": [{"turns": ["One?", "Two?"], "reference": ["First.", "Second."]}, {"turns": ["Three?"]}],
    }
    for name, lines in rows.items():
        (folder / name).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder


def test_requests_are_seeded_and_those_of_a_longer_run_begin_alike():
    texts = shipped()
    some, more = arrange(texts, KINDS, 30, 1), arrange(texts, KINDS, 80, 1)
    assert some == more[:30] == arrange(texts, KINDS, 30, 1) != arrange(texts, KINDS, 30, 2)
    assert {task.kind for task in more} == set(KINDS)
    assert arrival_times(2.0, 30, 1) == pytest.approx([2 * t for t in arrival_times(4.0, 80, 1)[:30]])


def test_requests_keep_to_the_caps():
    for task in arrange(shipped(), KINDS, 300, 0):
        assert 1 <= len(task.prompt) <= CAPS.prompt and CAPS.least_output <= task.output <= CAPS.output


def test_files_of_a_folder_are_read_and_what_it_lacks_is_made(tmp_path):
    texts = read_texts(written(tmp_path), encode, CAPS)
    assert texts.talks["chat"] == ((Task("chat", tuple(encode("User: Say it.\nAssistant:")), 11),),)
    assert texts.talks["code"][0][0].output == len("    return 1\n")
    assert "HumanEval" in texts.sources["code"]
    (tmp_path / "humaneval-x.jsonl").unlink()
    texts = read_texts(tmp_path, encode, CAPS)
    assert "GSM8K" in texts.sources["code"] and "HumanEval" not in texts.sources["code"]
    assert len(texts.talks["code"]) > 50


def test_a_conversations_turn_begins_with_all_that_was_said(tmp_path):
    (talk,) = read_texts(written(tmp_path), encode, CAPS).talks["several turns"]
    assert len(talk) == 3
    for turn, following in pairwise(talk):
        assert following.prompt[: len(turn.prompt)] == turn.prompt
    assert bytes(talk[1].prompt).endswith(b" First.\nUser: Two?\nAssistant:") and talk[0].output == len(" First.\n")


def test_turns_come_in_their_order_between_others():
    texts = read_texts(None, encode, Caps(4000, 60))
    tasks = [task.prompt for task in arrange(texts, {"several turns": 1.0}, 60, 3)]
    talks = texts.talks["several turns"]
    assert max(map(len, talks)) == 4 and len(set(tasks)) == 60
    for talk in talks:
        places = [tasks.index(turn.prompt) for turn in talk if turn.prompt in tasks]
        assert places == sorted(places)
    assert any(b[: len(a)] != a for a, b in pairwise(tasks)), "conversations are mixed"


def test_prompts_about_documents_begin_alike_where_the_document_is_popular(tmp_path):
    tasks = arrange(read_texts(written(tmp_path), encode, CAPS), {"documents": 1.0}, 40, 0)
    starts = [task.prompt[:60] for task in tasks]
    assert len(set(starts)) < len(starts) / 2


def test_a_line_without_a_field_is_named(tmp_path):
    (tmp_path / "alpaca.jsonl").write_text('{"prompt": "x"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"alpaca.jsonl has a line without 'output'"):
        read_texts(tmp_path, encode, CAPS)


def test_tokens_of_a_small_vocabulary_begin_alike_where_the_text_did():
    first, second = within([Task("a", (5, 300, 7), 3), Task("a", (5, 300, 9), 3)], 100)
    assert first.prompt == (5, 0, 7) and second.prompt[:2] == first.prompt[:2]


def test_the_mix_that_shares_is_part_of_the_kinds():
    assert set(SHARING) < set(KINDS) and sum(KINDS.values()) == pytest.approx(1.0)


def answer(due, times, error=None):
    return Answer(due, list(times), times[-1], 10, len(times), error)


def test_latencies_count_from_when_a_request_was_due():
    tasks = [Task("chat", (1,) * 10, 2), Task("code", (1,) * 10, 4)]
    answers = [answer(0.0, [1.0, 2.0]), answer(1.0, [2.0, 2.5, 3.0, 5.0])]
    row = measured(tasks, answers, 0.0, 1.0, Limits())
    assert row["normalised"] == {"mean": 1.0, "p50": 1.0, "p99": 1.0, "all": True} and latency(row) == 1.0
    assert row["ttft"]["mean"] == 1.0 and row["seconds"] == 5.0 and row["request_rate"] == 0.4
    assert row["inter_token"]["mean"] == pytest.approx((1.0 + 0.5 + 0.5 + 2.0) / 4)
    assert row["by_kind"] == {"chat": 1.0, "code": 1.0}


def test_a_run_that_was_cut_off_is_slower_than_any():
    tasks = [Task("chat", (1,), 2)] * 2
    answers = [answer(0.0, [1.0, 2.0]), answer(0.0, [1.0], "cut off")]
    row = measured(tasks, answers, 0.0, 1.0, Limits())
    assert latency(row) == math.inf and row["normalised"]["mean"] == 1.0 and row["completed"] == 1


def test_an_answer_of_another_length_than_asked_for_is_an_error():
    with pytest.raises(ValueError, match="has 2 tokens, and 3 were asked for"):
        measured([Task("chat", (1,), 3)], [answer(0.0, [1.0, 2.0])], 0.0, 1.0, Limits())


def test_seeds_are_told_by_their_mean_and_ends():
    assert over_seeds([1.0, 2.0, 6.0]) == (3.0, 1.0, 6.0)
    assert figure([{"a": {"b": 1.0}}, {"a": {"b": None}}], "a", "b") == (1.0, 1.0, 1.0)
    assert tables.spread((3.0, 1.0, 6.0), 1) == "3.0 (1.0-6.0)"
    assert tables.spread((3.04, 3.01, 3.04), 1) == "3.0" and tables.spread((math.nan,) * 3) == "-"


def made(rate, seed, value, share=1.0, **more):
    spread = {"mean": value, "p50": value, "p90": value, "p99": 2 * value}
    row = {"rate": rate, "seed": seed, "share": share, "normalised": spread | {"all": math.isfinite(value)}}
    row |= dict.fromkeys(("ttft", "inter_token", "latency"), spread)
    row |= {"by_kind": {"chat": value}, "goodput": rate, "preemptions": 1, "cached": 5, "prompt_tokens": 10}
    return row | more


def test_the_sustained_rate_is_found_between_those_that_were_measured():
    runs = [made(rate, seed, value + 0.01 * seed) for rate, value in ((1.0, 0.1), (4.0, 0.4)) for seed in (0, 1)]
    found = curve("x", runs, 0.2)
    assert found["points"] == [(1.0, pytest.approx(0.105)), (4.0, pytest.approx(0.405))]
    assert found["spread"][0] == (1.0, 0.1, pytest.approx(0.11)) and not found["is_least"]
    assert found["sustained_by_seed"][0] == pytest.approx(2.0)
    assert found["sustained_by_seed"][1] < found["sustained_by_seed"][0]
    assert curve("x", runs, 1.0)["is_least"] and curve("x", runs, 1.0)["sustained"] == 4.0
    assert curve("x", runs, 0.05)["sustained"] == 0.0


@dataclass(frozen=True)
class ScriptedBench(Bench):
    """Answers at once: a request takes 0.04 s a token up to the rate in `breaks`, and ten times as long beyond."""

    breaks: Mapping[str, float] = field(default_factory=dict)

    def run(self, policy, tasks, times, rate):
        return made(rate, 0, 0.04)

    def tasks(self, number, seed, shares):
        return [None] * number

    def saturation(self, policy, shares):
        return 2.0

    def at(self, policy, rate, seed, shares):
        return made(rate, seed, 0.04 if rate <= self.breaks[policy.name] else 0.4)


def test_rates_rise_until_the_limit_is_passed():
    plan = Plan(shares=(1.0, 2.0, 4.0), seeds=(0, 1))
    breaks = {PAGED: 9.0, MAX: 3.0, ORACLE: 1.0}
    bench = ScriptedBench(SimpleNamespace(name="demo", says=""), shipped(), plan, str, breaks=breaks)
    systems = load(bench, [PAGED, ORACLE, MAX])["systems"]
    assert [rate for rate, _ in systems[PAGED]["points"]] == [2.0, 4.0, 8.0] and systems[PAGED]["is_least"]
    assert [rate for rate, _ in systems[MAX]["points"]] == [2.0, 4.0] and 2.0 < systems[MAX]["sustained"] < 4.0
    assert [rate for rate, _ in systems[ORACLE]["points"]] == [2.0] and systems[ORACLE]["sustained"] == 0.0
    assert all(len(system["runs"]) == 2 * len(system["points"]) for system in systems.values())


def results():
    def system(rates, values):
        runs = [
            made(rate, seed, value, share)
            for rate, value, share in zip(rates, values, (0.5, 1.5), strict=True)
            for seed in (0, 1, 2)
        ]
        return {"saturation": rates[1]} | {"runs": runs} | curve("x", runs, 0.2)

    systems = {PAGED: system((2.0, 6.0), (0.1, 0.4)), ORACLE: system((2.0, 5.0), (0.1, 0.4))}
    systems[MAX] = system((0.5, 1.5), (0.1, math.inf))
    load = {"model": "demo", "says": "", "alone": 0.04, "limit": 0.2, "systems": systems}
    hybrid = load | {
        "model": RANDOM,
        "says": "12 layers.",
        "systems": {PAGED: systems[PAGED], LARGEST: systems[ORACLE]},
    }
    ways = [made(2.0, seed, 0.1, policy=name) for name in ("one way", "another") for seed in (0, 1, 2)]
    engines = [made(3.0, 0, 0.1, engine=PAGED), made(3.0, 0, 0.3, engine="vllm"), made(3.0, 0, 0.05, engine="openvino")]
    settings = {
        "quick": False,
        "shares": KINDS,
        "sources": {"chat": "Alpaca's prompts"},
        "prompt": 384,
        "output": 128,
        "pool_tokens": 2048,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "step_tokens": 512,
        "seconds": 6.0,
        "rates": (0.5, 1.5),
        "seeds": (0, 1, 2),
        "batch": 24,
        "slower": 5.0,
    }
    return {
        "models": [load, hybrid],
        "settings": settings,
        "mechanisms": {"model": "demo", "chunking": ways, "preemption": ways, "eviction": ways},
        "peers": {"saturation": {PAGED: 4.0, "vllm": 3.0, "openvino": 2.0}, "rate": 3.2, "runs": engines},
    }


def test_the_page_is_written_whole_from_the_figures():
    text = page(finite(results()), "jpaged bench serving --docs docs", "2 cores of a machine")
    assert text.startswith("# Serving over time, measured\n")
    assert "`jpaged bench serving --docs docs`\non 2 cores of a machine" in text
    for heading in ("## demo: latency", "## A Gemma-3-shaped", "### Chunks", "### The way back", "## Against other"):
        assert heading in text
    assert "| jpaged | 6.00 | 3.46 |  |" in text and "| Orca (Oracle) | 5.00 | 3.16 | 1.10 |" in text
    assert "a pool of 2,048 tokens" in text and "(Max) runs 2\n  at once" in text and "3 seeds" in text
    assert "2 times Orca (Max)'s rate is reached" in text and "1.3 times Orca (Oracle)'s rate is not reached" in text
    assert "random weights: latency against rate\n\n12 layers.\n\n![" in text
    assert "\\* Requests were cut off" in text and "In steps of 128 tokens" in text
    assert "jpaged's p99 of whole answers, 0.20 s, is below vllm's (0.60 s) and above openvino's (0.10 s)" in text
    assert "The goal, to be below all of them, is not reached." in text
    assert "is 0.80 of the best one's own batch rate" in text
    assert "it is 0.80 of jpaged's, 1.07 of vllm's, 1.60 of openvino's" in text
    assert "A static split and the GCD page are not here" in text and "| HumanEval | `humaneval*.jsonl` |" in text
    for name in (PAGED, LARGEST, ORACLE, MAX):
        assert f"- **{name}**: " in text
    assert "{" not in text, "every blank is filled"


def test_a_goal_against_other_engines_is_reached_where_none_is_faster():
    found = results()["peers"]
    del found["saturation"]["openvino"]
    found["runs"] = found["runs"][:2]
    assert "The goal, to be below all of them, is reached." in ahead(found)


def test_the_default_order_of_eviction_is_told_beside_lru():
    def run(policy, seed, mean, cached):
        return {"policy": policy, "seed": seed, "normalised": {"mean": mean, "all": True}} | {
            "cached": cached,
            "prompt_tokens": 100,
        }

    rows = [run("lru", 0, 0.1, 40), run(DEFAULT, 0, 0.09, 50), run("lru", 1, 0.1, 40), run(DEFAULT, 1, 0.1, 60)]
    told = against_lru(rows)
    assert "takes 0.95 (0.90-1.00) times as long a token" in told and "55 % of the prompts' tokens against 40 %" in told
    assert against_lru(rows[:1]) == ""


def test_batches_and_reservations_of_the_longest_are_told_to_be_alike_where_one_region_fits():
    found = results()
    systems = found["models"][0]["systems"]
    systems[FASTER] = systems[MAX]
    assert "let in the same ones" not in page(finite(found), "x", "y")
    found["settings"]["pool_tokens"] = 1024
    text = page(finite(found), "x", "y")
    assert "FasterTransformer and Orca (Max) let in the same ones" in text


def test_a_rate_that_is_known_from_below_only_decides_no_goal():
    found = results()
    systems = found["models"][0]["systems"]
    systems[MAX]["is_least"] = True
    text = page(finite(found), "x", "y")
    assert "whether 2 times Orca (Max)'s rate is reached is not known" in text
    assert re.search(r"\\| Orca \\(Max\\) \\| 1\\.50 \\| at least [0-9.]+ \\|  \\|", text)
    systems[PAGED]["is_least"] = True
    text = page(finite(found), "x", "y")
    assert "1.3 times Orca (Oracle)'s rate is not known (at least 1.10)" in text
    assert "| Orca (Oracle) | 5.00 | 3.16 | at least 1.10 |" in text


def test_the_page_without_other_engines_and_mechanisms_has_no_such_headings():
    found = results()
    del found["mechanisms"], found["peers"]
    text = page(finite(found), "x", "y")
    assert "no number here" not in text
    found["settings"] |= {"quick": True}
    assert "no number here is a\nmeasurement" in page(finite(found), "x", "y")
    assert "Against other engines" not in text and "each mechanism" not in text and "What this does not say" in text


def test_every_policy_is_explained_on_the_page():
    from jpaged.benchmarks.serving_real.page import POLICIES as told

    assert set(told) == set(POLICIES)


def test_what_json_lacks_becomes_null():
    assert finite({"a": [math.inf, (1.0, math.nan)], "b": "x"}) == {"a": [None, [1.0, None]], "b": "x"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"shares": ()}, "shares"),
        ({"seconds": math.inf}, "seconds=inf"),
        ({"shares": (0.0,)}, "share=0.0"),
        ({"shares": (2.0, 1.0)}, r"shares=\(2.0, 1.0\) must ascend"),
    ],
)
def test_a_plan_names_what_is_wrong(wrong, told):
    with pytest.raises(ValueError, match=told):
        Plan(**wrong)


def test_a_pages_command_names_what_is_not_the_default(tmp_path):
    given = [("workloads", tmp_path, None), ("seconds", 6.0, 6.0), ("quick", True, False), ("share", 0.5, None)]
    assert (
        page_command("serving", given)
        == f"jpaged bench serving --workloads {tmp_path.name} --quick --share 0.5 --docs docs"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--part", "none"], "--part none is none of load"),
        (["--part", "peers"], "--part peers needs --env"),
        (["--env", "openvino"], "--env openvino is not NAME=DIR"),
        (["--env", "other=x"], "other is none of openvino"),
        (["--share", "0"], "share=0.0"),
    ],
)
def test_options_that_are_wrong_are_refused_before_anything_runs(options, told):
    done = CliRunner().invoke(app, ["bench", "serving", *options], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert done.exit_code == 2 and told in " ".join(done.output.split())

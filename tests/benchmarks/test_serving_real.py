"""Serving over time on the real engine: what is asked, what a run gave, and the options of the command."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
from serving_real_rows import made
from typer.testing import CliRunner

from jpaged.benchmarks.serving_answer import Answer
from jpaged.benchmarks.serving_load import arrival_times
from jpaged.benchmarks.serving_real import tables
from jpaged.benchmarks.serving_real.experiments import Bench, Plan, curve, load
from jpaged.benchmarks.serving_real.measures import figure, latency, measured, over_seeds
from jpaged.benchmarks.serving_real.run import Ask
from jpaged.benchmarks.serving_real.workload import KINDS, SHARING, Caps, Task, arrange, read_texts, within
from jpaged.benchmarks.serving_report import Limits
from jpaged.benchmarks.serving_sim.policies import MAX, ORACLE, PAGED
from jpaged.cli.bench_serving import MAX_MODEL_LEN, POOL_TOKENS
from jpaged.cli.main import app

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


@pytest.mark.parametrize(("longest", "prompt", "output"), [(512, 384, 128), (1024, 384, 128), (256, 192, 64)])
def test_the_longest_request_that_is_asked_for_is_one_that_may_be(longest, prompt, output):
    ask = Ask("x", None, Plan(), pool_tokens=1024, max_model_len=longest)
    assert (ask.caps.prompt, ask.caps.output) == (prompt, output)
    assert MAX_MODEL_LEN == Caps.prompt + Caps.output <= POOL_TOKENS


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

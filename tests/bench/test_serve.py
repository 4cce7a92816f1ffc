"""`jpaged bench serve` sends what it is told, when it is told, and counts only what came back whole."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from scripted_server import Script, scripted_server
from typer.testing import CliRunner

from jpaged.bench.client import Answer, Target
from jpaged.bench.load import HASH_BLOCK, Ask, Demand, arrival_times, asks_of, read_asks
from jpaged.bench.report import Limits, Spread, summarise, table
from jpaged.bench.serve import Plan, run
from jpaged.cli.main import app

ASKS = [Ask(f"a prompt of {i}", 5) for i in range(12)]
FAST = Plan((60.0,), warmup=0, max_seconds=20)


def measure(script: Script, asks=ASKS, plan=FAST, **target):
    told = []
    with scripted_server(script) as url:
        reports = run(Target(url, "m", **target), asks, plan, Limits(), lambda *progress: told.append(progress))
    return reports, told


# ------------------------------------------------------------------ arrivals


def test_poisson_gaps_have_the_mean_of_the_rate_and_as_much_spread():
    times = arrival_times(8.0, 4001, seed=1)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0 and min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.07)


def test_bursty_gaps_have_the_same_mean_and_more_spread():
    times = arrival_times(8.0, 8001, seed=1, burstiness=0.25)
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(2 / 8, rel=0.1), "the variance is four times as large"


def test_an_infinite_rate_sends_all_at_once_and_a_seed_repeats():
    assert arrival_times(math.inf, 3, seed=0) == [0, 0, 0]
    assert arrival_times(2, 9, 4, 0.5) == arrival_times(2, 9, 4, 0.5)
    assert arrival_times(2, 9, 4, 0.5) != arrival_times(2, 9, 5, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": ()}, "at least 1 rate"),
        ({"rates": (0.0,)}, "rate=0.0 must be above 0"),
        ({"rates": (1.0,), "burstiness": 1.5}, r"burstiness=1.5 is not in \(0, 1\]"),
        ({"rates": (1.0,), "max_seconds": math.inf}, "max_seconds=inf must be above 0 and finite"),
        ({"rates": (1.0,), "warmup": -1}, "warmup=-1 must be at least 0"),
    ],
)
def test_a_plan_without_bounds_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Plan(**options)


# ------------------------------------------------------------------ what is asked


def test_lines_of_several_kinds_are_read(tmp_path):
    file = tmp_path / "asks.jsonl"
    lines = [
        {"prompt": "p", "output_len": 7},
        {"turns": ["first", "second"]},
        {"question": "q", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "m"}]},
        {"prompt": "one too many"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    asks = read_asks(file, 4, 50)
    assert [ask.max_tokens for ask in asks] == [7, 50, 3, 50]
    assert [ask.content for ask in asks] == ["p", "first", "q", ({"role": "user", "content": "m"},)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "p"}\n{"answer": 3}', r"line 2 has none of messages, turns, .*: it has \['answer'\]"),
        ("nothing", "line 1 is not JSON"),
        ("[1]", "line 1 is not an object"),
        ('{"prompt": "p", "output_len": 0}', "length 0 must be at least 1"),
        ("\n", "has no line"),
    ],
)
def test_a_line_that_asks_nothing_is_named(tmp_path, text, message):
    file = tmp_path / "asks.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_asks(file, 10, 5)


def test_prompts_of_a_trace_have_its_lengths_and_its_shared_beginnings():
    demands = [Demand(HASH_BLOCK + 30, 9, (4, 5)), Demand(HASH_BLOCK + 99, 8, (4, 6)), Demand(40, 7)]
    asks = asks_of(demands, seed=0)
    words = [ask.content.split() for ask in asks]
    assert [len(w) for w in words] == [HASH_BLOCK + 30, HASH_BLOCK + 99, 40]
    assert words[0][:HASH_BLOCK] == words[1][:HASH_BLOCK] and words[0][HASH_BLOCK:] != words[1][HASH_BLOCK:][:30]
    assert [ask.max_tokens for ask in asks] == [9, 8, 7]
    assert [len(ask.content.split()) for ask in asks_of(demands, 0, max_prompt=50)] == [50, 50, 40]
    assert asks_of(demands, seed=1)[2] != asks[2]


# ------------------------------------------------------------------ a run against a server


def test_latencies_are_those_of_the_server_and_tokens_as_it_counts_them():
    (report,), told = measure(Script(first=0.05, gap=0.02), api_key="secret")
    assert (report.sent, report.completed, report.errors) == (12, 12, {})
    assert 0.05 <= report.ttft.p50 < 0.25
    assert 0.015 <= report.inter_token.p50 < 0.1
    assert 0.13 <= report.latency.p50 < 0.6
    assert report.output_tokens == 12 * 5 and report.prompt_tokens == 12 * 4
    assert report.output_rate == pytest.approx(60 / report.seconds)
    assert told[-1] == (60.0, 12, 0) and [ended for _, ended, _ in told] == list(range(1, 13))


def test_each_request_asks_for_a_stream_with_usage_and_has_the_key():
    script = Script(first=0, gap=0)
    measure(script, api_key="secret", extra={"ignore_eos": True})
    body = next(body for body in script.bodies if body["prompt"] == "a prompt of 3")
    assert body == {
        "model": "m",
        "prompt": "a prompt of 3",
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert set(script.keys) == {"Bearer secret"}


@pytest.mark.parametrize("part", ["content", "reasoning", "reasoning_content"])
def test_chat_takes_texts_and_conversations_and_completions_no_conversation(part):
    script = Script(first=0, gap=0, usage=False, part=part)
    talk = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    (report,), _ = measure(script, [Ask("text", 3), Ask(talk, 3)], endpoint="chat")
    assert report.completed == 2 and report.output_tokens == 6, "without usage the parts are counted"
    assert {len(body["messages"]) for body in script.bodies} == {1, 2}
    with pytest.raises(ValueError, match="a prompt is a conversation"):
        run(Target("http://127.0.0.1:9", "m"), [Ask(talk, 3)], FAST, Limits(), lambda *_: None)


@pytest.mark.parametrize(
    ("script", "error", "failed"),
    [
        (Script(refuse=3, gap=0), "HTTP 429: too many requests", 4),
        (Script(break_off=True, gap=0), "the stream ended before [DONE]", 12),
        (Script(fail=True, gap=0), "in the stream: the device is gone", 12),
        (Script(strange=True, gap=0), "an event that is no object: 3", 12),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_and_no_latency(script, error, failed):
    (report,), _ = measure(script)
    assert report.errors == {error: failed}
    assert report.completed == 12 - failed and report.good == report.completed
    assert report.output_tokens == 5 * report.completed
    assert math.isnan(report.ttft.p50) == (failed == 12)


def test_a_run_ends_when_its_time_is_up_and_cuts_off_what_is_open():
    script = Script(first=30)
    (report,), _ = measure(script, plan=Plan((10.0,), warmup=0, max_seconds=0.5))
    assert report.seconds < 3 and report.completed == 0
    assert 0 < report.sent < 12, "later ones were not sent"
    assert report.errors == {"cut off: the time was up": report.sent}
    assert report.planned == 12


def test_a_bound_on_open_requests_shows_in_the_latencies():
    script = Script(first=0.05, gap=0)
    (report,), _ = measure(script, plan=replace(FAST, rates=(math.inf,), max_concurrency=2))
    assert script.most_open == 2 and report.completed == 12
    assert report.ttft.p99 > 4 * 0.05, "the last ones waited for five others"


def test_each_rate_is_a_run_of_its_own_with_the_same_requests():
    script = Script(first=0.01, gap=0)
    reports, _ = measure(script, plan=replace(FAST, rates=(40.0, 400.0)))
    assert [report.rate for report in reports] == [40, 400]
    assert reports[0].seconds > 2 * reports[1].seconds
    prompts = [body["prompt"] for body in script.bodies]
    assert sorted(prompts[:12]) == sorted(prompts[12:])


def test_a_server_that_is_not_there_is_told_before_anything_is_measured():
    with pytest.raises(ValueError, match="did not answer the first request: ConnectError"):
        run(Target("http://127.0.0.1:9", "m"), ASKS, replace(FAST, warmup=1), Limits(), lambda *_: None)
    with pytest.raises(ValueError, match="names no model"):
        run(Target("http://127.0.0.1:9", ""), ASKS, FAST, Limits(), lambda *_: None)


# ------------------------------------------------------------------ the report


def answer(due, first, gap, tokens, error=None):
    times = [due + first + gap * i for i in range(tokens)]
    return Answer(due, times, times[-1], 10, tokens, error)


def test_goodput_counts_answers_that_meet_every_limit():
    answers = [answer(0, 0.1, 0.01, 11), answer(0, 0.9, 0.01, 11), answer(0, 0.1, 0.5, 3), answer(0, 0.1, 0.01, 91)]
    assert summarise(1, 4, answers, 0, Limits()).good == 4
    assert summarise(1, 4, answers, 0, Limits(ttft=0.5)).good == 3
    assert summarise(1, 4, answers, 0, Limits(ttft=0.5, per_token=0.05)).good == 2
    report = summarise(1, 4, answers, 0, Limits(ttft=0.5, per_token=0.05, latency=0.5))
    assert report.good == 1
    assert report.goodput == pytest.approx(1 / 1.1)


def test_percentiles_are_over_all_answers_and_gaps():
    answers = [answer(0, i / 100, 0.02, 3) for i in range(1, 102)]
    report = summarise(2, 200, [*answers, answer(0, 9, 9, 2, error="HTTP 500: x")], 0, Limits())
    assert (report.ttft.p50, report.ttft.p90, report.ttft.p99) == pytest.approx((0.51, 0.91, 1.0))
    gaps = report.inter_token
    assert (gaps.mean, gaps.p50, gaps.p99) == pytest.approx((0.02, 0.02, 0.02))
    assert (report.sent, report.completed, report.planned) == (102, 101, 200)


def test_latencies_are_shown_in_milliseconds_of_three_figures_or_more():
    report = summarise(1, 3, [answer(0, 0.0998, 0.00123, 2), answer(0, 0.9997, 1.5, 2)], 0, Limits())
    shown = table([replace(report, ttft=Spread(1, 0.0998, 0.09996, 0.9997), latency=Spread(1, 0.00123, 1.5, 12))], "")
    assert list(shown.columns[6].cells) == ["99.8 / 100 / 1000"]
    assert list(shown.columns[8].cells) == ["1.23 / 1500 / 12000"]


def test_a_table_has_a_row_a_rate_and_json_has_no_nan():
    report = summarise(math.inf, 3, [answer(0, 1, 1, 2, error="HTTP 500: x")], 0, Limits())
    shown = table([report, replace(report, rate=2.5)], "title")
    assert list(shown.columns[0].cells) == ["all", "2.5"] and list(shown.columns[6].cells) == ["-", "-"]
    body = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert body["rate"] is None and body["ttft"]["p50"] is None and body["errors"] == {"HTTP 500: x": 1}


# ------------------------------------------------------------------ the command


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "hello there", "output_len": 4}\n{"prompt": "again"}\n')
    with scripted_server(Script(first=0.01, gap=0.001)) as url:
        options = [
            "--prompts",
            str(prompts),
            "--max-tokens",
            "6",
            "--num-requests",
            "5",
            "--rate",
            "50",
            "--rate",
            "inf",
        ]
        limits = ["--limit-ttft", "5000", "--out", str(out)]
        result = CliRunner().invoke(app, ["bench", "serve", "--url", url, *options, *limits], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "5/5" in result.output and "50 requests/s" in result.output
    body = json.loads(out.read_text())
    assert body["settings"]["rates"] == [50, None] and body["settings"]["limits"]["ttft"] == 5
    assert [one["completed"] for one in body["runs"]] == [5, 5]
    assert [one["output_tokens"] for one in body["runs"]] == [3 * 4 + 2 * 6] * 2, "the two lines take turns"


def test_the_command_draws_latency_against_rate(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    with scripted_server(Script(first=0.01, gap=0.001)) as url:
        options = ["--num-requests", "3", "--rate", "40", "--rate", "80", "--mean-output", "3", "--plot", str(file)]
        result = CliRunner().invoke(app, ["bench", "serve", "--url", url, *options])
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--endpoint", "embeddings"], "none of chat, completions"),
        (["--arrivals", "uniform"], "none of poisson, bursty"),
        (["--rate", "0"], "must be above 0"),
        (["--burstiness", "0.5"], "--burstiness is for --arrivals bursty"),
        (["--max-tokens", "5"], "--max-tokens is for --prompts"),
        (["--out", "missing/figures.json"], "--out missing/figures.json: there is no folder"),
        (["--plot", "missing/plot.png"], "--plot missing/plot.png: there is no folder"),
        (["--url", "http://127.0.0.1:9", "--model", "m"], "did not answer the first request"),
    ],
)
def test_what_can_not_be_measured_is_refused(options, message):
    result = CliRunner().invoke(app, ["bench", "serve", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", "").split())

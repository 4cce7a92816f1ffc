"""The sharing benchmark's tables and arithmetic; its timings are not a test's business."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from jpaged.benchmarks import sharing
from jpaged.benchmarks.prompts import questions, translations
from jpaged.benchmarks.returning_steps import count
from jpaged.benchmarks.sharing import PrefixFactor, Run, in_turns
from jpaged.benchmarks.sharing_report import _outputs_table, _prefix_table, _returning_table, page, plot, public_name
from jpaged.cli import bench


def run_of(name="n=2", seconds=2.0, tokens=100, blocks=30, saving=0.25, **more) -> Run:
    cached, preemptions = more.pop("cached", 0), more.pop("preemptions", 0)
    return Run(name, seconds, tokens, cached, blocks, saving, preemptions, computed=1592, pool_blocks=50, **more)


def test_sharing_stands_beside_the_same_outputs_apart_and_the_papers_figure():
    runs = [
        ("on", run_of(cpu_seconds=5.0)),
        ("off", run_of(seconds=4.0, blocks=40, saving=0.0, cpu_seconds=10.0)),
    ]
    table = _outputs_table(runs)
    assert table.splitlines()[-1] == "| n=2 | 50.0 | 25.0 | 20.0 | 10.0 | 30 | 40 | 25.0% | 6.09 % |"


def test_beams_have_no_counterpart_without_sharing():
    table = _outputs_table([("on", run_of("beam 4"))])
    assert table.splitlines()[-1] == "| beam 4 | 50.0 | - | 0.0 | - | 30 | - | 25.0% | 53.13 % |"


def test_the_prefix_table_tells_the_measured_and_the_predicted_factor():
    factor = PrefixFactor(5, run_of(seconds=6.0), run_of(seconds=2.0, cached=900), predicted=3.2)
    assert factor.measured == pytest.approx(3.0)
    assert _prefix_table([factor]).splitlines()[-1] == "| 5-shot | 16.7 | 50.0 | 0.0 | 0.0 | 900 | 3.00 | 3.20 |"
    factor = PrefixFactor(5, run_of(seconds=6.0, cpu_seconds=8.0), run_of(cpu_seconds=4.0), predicted=3.2)
    assert factor.measured == pytest.approx(2.0), "other programs hardly change the processor's time"


def test_preemptions_are_told_with_the_speed():
    table = _returning_table([(16, "swap", run_of(preemptions=7, steps=201, cpu_seconds=4.0))])
    assert table.splitlines()[-1] == "| 16 | swap | 50 | 201 | 1,592 | 7 | 50.0 | 25.0 |"


def test_block_sizes_cost_both_ways_of_return_alike_and_little():
    counts = {(size, mode): count(size, mode) for size in (16, 64) for mode in ("recompute", "swap")}
    for size in (16, 64):
        recompute, swap = counts[size, "recompute"], counts[size, "swap"]
        assert abs(recompute.steps - swap.steps) <= 1 and recompute.preemptions == swap.preemptions > 0
        assert recompute.moved == 0 < swap.moved and recompute.computed > swap.computed
    small, large = counts[16, "swap"], counts[64, "swap"]
    assert small.steps < large.steps < 1.1 * small.steps
    assert 64 * large.moved < 1.2 * 16 * small.moved


def test_ways_take_turns_and_the_run_of_median_processor_time_is_told():
    order, costs = [], {"one": iter([3.0, 1.0, 2.0]), "other": iter([5.0, 9.0, 7.0])}

    def way(name):
        order.append(name)
        return run_of(name, cpu_seconds=next(costs[name]))

    found = in_turns({name: partial(way, name) for name in costs}, 3)
    assert order == ["one", "other", "other", "one", "one", "other"]
    assert [found[name].cpu_seconds for name in costs] == [2.0, 7.0]


class Scripted:
    """Notes what it is asked to generate."""

    def __init__(self, asked, model, **settings):
        self.asked, self.max_model_len, self.tokenizer = asked, 512, SimpleNamespace(encode=str.split)
        self.settings = settings

    def reset_prefix_cache(self):
        self.asked.append((self, "reset"))

    def beam_search(self, prompts, params, **_):
        pass


def scripted(monkeypatch):
    asked = []

    def generate(llm, name, prompts, params):
        asked.append((llm, name, len(prompts), params))
        return run_of(name, cpu_seconds=1.0)

    monkeypatch.setattr(sharing, "_engine", partial(Scripted, asked))
    monkeypatch.setattr(sharing, "_generate", generate)
    monkeypatch.setattr(sharing, "_measure", lambda llm, name, work: generate(llm, name, [], None))
    monkeypatch.setattr(sharing, "real_prompts", lambda tokenizer, lengths: [[7] * length for length in lengths])
    return asked


def test_an_engines_first_run_is_not_told_and_both_ways_of_several_outputs_take_turns(monkeypatch):
    asked = scripted(monkeypatch)
    told = list(sharing.outputs_of_a_prompt("some", num_prompts=2, output_tokens=8, seed=0))
    assert [name for _, name, *_ in asked[:7]] == ["first"] + 6 * ["n=1"]
    assert [(mode, run.name) for mode, run in told[:4]] == [
        ("on", "n=1"),
        ("off", "n=1"),
        ("on", "n=2"),
        ("off", "n=2"),
    ]
    assert [number for _, _, number, _ in asked[7:13]] == [2, 4, 4, 2, 2, 4]


def test_prompts_behind_a_warm_prefix_find_nothing_of_the_run_before(monkeypatch):
    asked = scripted(monkeypatch)
    (one, _) = sharing.shared_prefixes("some", [("what", "this")] * 9, num_prompts=3)
    cached = [it for it in asked if it[0].settings["enable_prefix_caching"]]
    first, second = cached[:10], cached[10:]
    assert [it[1] for it in first] == ["first", *3 * ["reset", "prefix", "1-shot"]]
    assert {it[2] for it in first if it[1] == "prefix"} == {1} and len(second) == 10
    assert one.measured == 1.0
    plain = [it[1] for it in asked if not it[0].settings["enable_prefix_caching"]][:7]
    assert plain == ["first", "prompts only", "1-shot", "1-shot", "prompts only", "prompts only", "1-shot"]


def test_the_page_says_what_is_warm_and_names_the_workload():
    outputs = [("on", run_of()), ("off", run_of(seconds=4.0))]
    outputs += [("on", run_of("n=1", cpu_seconds=2.0)), ("off", run_of("n=1", cpu_seconds=2.05))]
    factors = [
        PrefixFactor(1, run_of(), run_of(cached=272), predicted=1.4),
        PrefixFactor(5, run_of(seconds=6.0), run_of(cached=2336), predicted=2.5),
    ]
    returned = [(size, mode, run_of(cpu_seconds=4.0)) for size in (16, 64) for mode in ("recompute", "swap")]
    text = page((outputs, factors, returned), "some", "jpaged bench sharing", "a machine", public_name(None))
    assert "The task is GSM8K (questions and answers). **The cache is warm**" in text
    assert "With n=1 both ways are the same work; they differ by 2.5%." in text
    assert "With 1 shot the 272 tokens" in text and "With 5 shots more is saved" in text
    assert "1.00 with blocks of 16, 1.00 with blocks of 64" in text
    assert "GSM8K is shipped with the package. Other files are named by `--examples`." in text
    assert "| WMT16 | `wmt16*.jsonl` | `en`, `de` |" in text
    assert public_name(Path("wmt16-en-de-dev.jsonl")) == "WMT16 (English to German)"


def test_the_plot_is_two_files(tmp_path):
    pytest.importorskip("matplotlib")
    factors = [PrefixFactor(5, run_of(seconds=6.0), run_of(cached=2336), predicted=2.5)]
    returned = [(size, mode, run_of(cpu_seconds=4.0)) for size in (16, 64) for mode in ("recompute", "swap")]
    plot(([("on", run_of("n=2"))], factors, returned), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"sharing.png", "sharing.svg"}


def test_no_mark_at_the_top_of_the_plot_is_cut(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    factors = [PrefixFactor(5, run_of(seconds=6.0), run_of(cached=2336), predicted=2.5)]
    seconds = {"recompute": 4.0, "swap": 2.0}
    returned = [(size, mode, run_of(cpu_seconds=seconds[mode])) for size in (16, 64) for mode in seconds]
    plot(([("on", run_of("n=2"))], factors, returned), tmp_path)
    speeds = drawn[0].axes[2]
    assert speeds.get_ylim() == pytest.approx((0, 1.08 * returned[1][2].tokens_per_cpu_second))


def test_examples_are_pairs_of_a_question_and_its_answer(tmp_path):
    assert len(questions()) > 50 and all(question and answer for question, answer in questions())
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"en": "Hello", "de": "Hallo"}) + "\n", encoding="utf-8")
    assert translations(file) == [("Translate into German: Hello", "Hallo")]


@pytest.mark.parametrize("command", ["sharing", "memory"])
def test_docs_without_matplotlib_are_refused_before_anything_is_measured(command, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    result = CliRunner().invoke(bench.app, [command, "--docs", str(tmp_path / "docs")])
    assert result.exit_code == 2 and "matplotlib" in result.output
    assert not (tmp_path / "docs").exists()

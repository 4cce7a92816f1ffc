"""The sharing benchmark's tables and arithmetic; its timings are not a test's business."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jpaged.benchmarks.prompts import questions, translations
from jpaged.benchmarks.sharing import PrefixFactor, Run
from jpaged.benchmarks.sharing_report import _outputs_table, _prefix_table, _returning_table
from jpaged.cli import bench


def run_of(name="n=2", seconds=2.0, tokens=100, blocks=30, saving=0.25, **more) -> Run:
    return Run(name, seconds, tokens, more.get("cached", 0), blocks, saving, more.get("preemptions", 0))


def test_sharing_stands_beside_the_same_outputs_apart_and_the_papers_figure():
    table = _outputs_table([("on", run_of()), ("off", run_of(seconds=4.0, blocks=40, saving=0.0))])
    assert table.splitlines()[-1] == "| n=2 | 50.0 | 25.0 | 30 | 40 | 25.0% | 6.09 % |"


def test_beams_have_no_counterpart_without_sharing():
    table = _outputs_table([("on", run_of("beam 4"))])
    assert table.splitlines()[-1] == "| beam 4 | 50.0 | - | 30 | - | 25.0% | 53.13 % |"


def test_the_prefix_table_tells_the_measured_and_the_predicted_factor():
    factor = PrefixFactor(5, run_of(seconds=6.0), run_of(seconds=2.0, cached=900), predicted=3.2)
    assert factor.measured == pytest.approx(3.0)
    assert _prefix_table([factor]).splitlines()[-1] == "| 5-shot | 16.7 | 50.0 | 900 | 3.00 | 3.20 |"


def test_preemptions_are_told_with_the_speed():
    table = _returning_table([(16, "swap", run_of(preemptions=7))])
    assert table.splitlines()[-1] == "| 16 | swap | 50.0 | 7 |"


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

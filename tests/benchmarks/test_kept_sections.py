"""Pages of which some sections are made again: the others stay, and each says which command made it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jpaged.benchmarks.serving_sim import page
from jpaged.benchmarks.serving_sim.kept_sections import both_settings, check_sections, kept_sections, maker, together
from jpaged.benchmarks.serving_sim.paged_experiments import Context
from jpaged.benchmarks.serving_sim.policies import ORACLE, PAGED
from jpaged.benchmarks.serving_sim.run import settings, workloads
from jpaged.cli.main import app

HEADINGS = {"one": "## One", "two": "### Two", "three": "## Three"}
PAGE = "# Page\n\nMade by `jpaged bench x --seed 3 --docs docs`.\n\n## One\n\nold 1\n\n## Three\n\nold 3\n\n"
PAGE += "## Where\n\nx\n"
AGAIN = "jpaged bench x --only two --only three --seed 3 --docs docs"


def test_sections_that_are_made_again_take_their_places_and_the_others_stay():
    fresh = {"two": "### Two\n\nnew 2\n", "three": "## Three\n\nnew 3\n"}
    assert list(kept_sections(PAGE)) == ["## One", "## Three", "## Where"]
    assert together(PAGE, fresh, HEADINGS, AGAIN) == [
        "## One\n\nold 1\n\n",
        f"### Two\n\nMade by `{AGAIN}`.\n\nnew 2\n",
        f"## Three\n\nMade by `{AGAIN}`.\n\nnew 3\n",
    ]


def test_a_page_keeps_the_name_of_the_command_that_made_the_rest_of_it():
    check_sections(PAGE, AGAIN, HEADINGS)
    assert maker(PAGE, AGAIN) == "jpaged bench x --seed 3 --docs docs"
    assert maker(PAGE.replace("--seed 3", "--seed 3 --million"), AGAIN).endswith("--seed 3 --million --docs docs")


def test_rules_that_have_changed_are_told_of_the_sections_that_are_made_again_only():
    page = PAGE.replace("docs`.\n", "docs`.\nRuns last 5 s.\nThere are 3.\n", 1)
    assert both_settings(page, ["Runs last 5 s.", "There are 3."]) == ["Runs last 5 s.", "There are 3."]
    both = both_settings(page, ["Runs last 9 s.", "There are 3."])
    assert both == [
        "Runs last 5 s.",
        "There are 3.",
        "",
        "In the sections that name another command:",
        "Runs last 9 s.",
    ]
    again = page.replace("Runs last 5 s.\nThere are 3.", "\n".join(both))
    assert both_settings(again, ["Runs last 9 s.", "There are 3."]) == both, "it is told once"


def test_a_page_of_other_options_or_of_unknown_sections_is_refused():
    with pytest.raises(ValueError, match="the page was made by `jpaged bench x --seed 3 --docs docs`"):
        check_sections(PAGE, AGAIN.replace("--seed 3", "--seed 4"), HEADINGS)
    with pytest.raises(ValueError, match="an unknown command"):
        check_sections("# Page\n", AGAIN, HEADINGS)
    with pytest.raises(ValueError, match="a section '## Three' that no experiment writes"):
        check_sections(PAGE, AGAIN, {"one": "## One"})


def test_every_heading_is_what_its_section_begins_with():
    known = kept_sections((Path(__file__).parents[2] / "docs" / "serving-sim.md").read_text(encoding="utf-8"))
    assert set(page.HEADINGS) == set(page.sections((1.0, 1.0), 1.0))
    assert list(page.HEADINGS.values()) == list(known)[:-1]


def test_a_command_with_only_makes_its_sections_of_the_page_that_is_there_again(tmp_path):
    pytest.importorskip("matplotlib")
    saved = {"workload": "ShareGPT", "rate": 0.3, "requests": 200, "n": 2, "beams": False, "saving": 0.15}
    row = {"workload": "ShareGPT", "rate": 2.0, "requests": 1000, "batch": {PAGED: 28.0, ORACLE: 15.0}}
    results = {"savings": [saved], "batches": [row]}
    kept, its = tmp_path / "results.json", settings(Context(workloads(None, lambda: len), 500.0, 0, print))
    kept.write_text(json.dumps({"settings": its, "parts": results}), encoding="utf-8")
    both = ["bench", "serving-sim", "--only", "savings", "--only", "batches"]
    last = ["--results", str(kept), "--docs", str(tmp_path)]
    made, done = tmp_path / "serving-sim.md", CliRunner().invoke(app, [*both, *last])
    assert done.exit_code == 0, done.output
    first = made.read_text(encoding="utf-8")
    results["savings"][0]["saving"] = 0.25
    kept.write_text(json.dumps({"settings": its, "parts": results}), encoding="utf-8")
    assert CliRunner().invoke(app, [*both[:4], *last]).exit_code == 0
    text = made.read_text(encoding="utf-8")
    whole, part = "--only savings --only batches --docs docs`", "--only savings --docs docs`"
    assert f"{whole}, but for the sections that name another command.\n" in text and f"{whole}.\n" in first
    before, after = kept_sections(first), kept_sections(text)
    assert list(before) == list(after) and before[page.HEADINGS["batches"]] == after[page.HEADINGS["batches"]]
    savings = after[page.HEADINGS["savings"]]
    assert "| 25.0 % |" in savings and f"Made by `jpaged bench serving-sim {part}.\n" in savings
    refused = CliRunner().invoke(app, [*both[:4], *last, "--seed", "1"])
    assert refused.exit_code == 2 and made.read_text(encoding="utf-8") == text

"""The figures of the disk's benchmark, and their place in docs/disk.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jpaged.benchmarks.marked_figures import marks, with_figures

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import bench_disk

        yield bench_disk
    finally:
        sys.path.remove(str(ROOT / "scripts"))


ARGS = argparse.Namespace(model="some", articles=6, article_tokens=960, held=2.5, space=2.0, rounds=2, output_tokens=8)


def test_figures_stand_between_the_pages_marks(script):
    rounds = [
        script.Round(0, "no disk", 5994, 0, (1.0, 2.0, 9.0), 21.0),
        script.Round(1, "disk", 234, 5760, (0.5,), 4.4),
    ]
    disk = SimpleNamespace(read_rate=173e6, seconds_per_token=0.0105, break_even=16)
    text = script.figures(rounds, True, disk, 46080, ARGS)
    assert "| 0 | no disk | 5,994 | 0 | 2.00 s | 9.00 s | 21.0 s |" in text
    assert "| 1 | disk | 234 | 5,760 | 0.50 s | 0.50 s | 4.4 s |" in text
    assert "read 173 MB/s, the steps to take 10.5 ms a token of 46 kB: prefixes are read from 16 tokens on." in text
    page = (ROOT / "docs" / script.PAGE).read_text(encoding="utf-8")
    before, after = page.split(marks(script.SCRIPT)[0])[0], page.split(marks(script.SCRIPT)[1])[1]
    written = with_figures(page, script.SCRIPT, text)
    assert written.startswith(before) and written.endswith(after) and text in written
    assert with_figures(written, script.SCRIPT, text) == written


def test_a_disk_that_is_never_worth_it_and_tokens_that_differ_are_told(script):
    disk = SimpleNamespace(read_rate=1e6, seconds_per_token=None, break_even=None)
    text = script.figures([], False, disk, 46080, ARGS)
    assert "**The engines' tokens differ.**" in text and "no prefix is read" in text and "ms a token" not in text


def test_a_page_without_a_place_for_figures_is_refused():
    with pytest.raises(ValueError, match=r"no place for figures: <!-- figures of some\.py -->"):
        with_figures("text", "some.py", "figures")

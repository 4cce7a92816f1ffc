"""Figures that are kept in a file: all that were measured before outlive an interruption."""

import json
from pathlib import Path

import pytest

from jpaged.benchmarks.kept_figures import check_place, keep


def test_an_interrupted_write_leaves_what_was_kept_before(tmp_path, monkeypatch):
    file = tmp_path / "figures.json"
    keep(file, {"load": 1})

    def interrupted(path, text, **options):
        with path.open("w") as begun:
            begun.write(text[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keep(file, {"load": 1, "peers": 2})
    assert json.loads(file.read_text()) == {"load": 1}
    monkeypatch.undo()
    keep(file, {"load": 1, "peers": 2})
    assert json.loads(file.read_text()) == {"load": 1, "peers": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_a_file_in_no_folder_is_refused_by_the_option_that_asked_for_it(tmp_path):
    check_place("--results", None)
    check_place("--results", tmp_path / "new.json")
    with pytest.raises(ValueError, match=r"--json .*missing/new\.json: there is no folder .*missing"):
        check_place("--json", tmp_path / "missing" / "new.json")

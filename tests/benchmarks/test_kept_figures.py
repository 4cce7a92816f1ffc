"""Figures that are kept in a file: all that were measured before outlive an interruption."""

import json
from pathlib import Path

import pytest

from jpaged.benchmarks.kept_figures import KeptFigures, check_place, keep


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


def test_figures_are_kept_with_the_settings_that_they_were_measured_by(tmp_path):
    file = tmp_path / "figures.json"
    KeptFigures({"seed": 0, "rates": (1, 2)}, file).add("load", {"points": (1.0, 2.0)})
    again = KeptFigures({"seed": 0, "rates": (1, 2)}, file)
    assert again.parts == {"load": {"points": [1.0, 2.0]}}
    with pytest.raises(ValueError, match=r"figures\.json was measured with seed 0, not 1: name another file"):
        KeptFigures({"seed": 1, "rates": (1, 2)}, file)
    for damaged in ('{"load": 1}', "{", "[]"):
        file.write_text(damaged)
        with pytest.raises(ValueError, match="does not say with which settings"):
            KeptFigures({"seed": 0}, file)
    assert KeptFigures({"seed": 0}, None).parts == {}

"""A wheel is tried on every page and notebook, and what fails is told; so is a start that takes too long."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scripts():
    sys.path.append(str(ROOT / "scripts"))
    try:
        import import_time
        import try_as_new

        yield try_as_new, import_time
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_all_guides_and_notebooks_are_tried_in_order(scripts):
    script, _ = scripts
    names = [page.relative_to(ROOT).as_posix() for page in script.guides()]
    assert names[:3] == ["README.md", "docs/index.md", "docs/getting_started.md"]
    pages = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")}
    decisions = {page for page in pages if page.startswith("docs/decisions/0")}  # prose, listed in their index only
    assert pages - decisions == set(names[1:])
    assert [book.stem[0] for book in script.notebooks()] == ["1", "2", "3", "4", "5", "6", "7"]


def test_a_page_that_fails_is_told_and_the_others_are_tried(scripts, tmp_path, monkeypatch, capsys):
    script, _ = scripts
    pages = {"bad": "print(nonesuch)", "good": "# family.py\nONE = 1\n```\n\n```python\nfrom family import ONE"}
    for name, code in pages.items():
        (tmp_path / f"{name}.md").write_text(f"# {name}\n\n```python\n{code}\n```\n")
    monkeypatch.setattr(script, "guides", lambda: [tmp_path / f"{name}.md" for name in pages])
    monkeypatch.setattr(script, "environment", lambda folder, *packages: Path(sys.executable))
    monkeypatch.setattr(script, "make_stand_ins", lambda python, folder, variables: folder.mkdir())
    wheel = str(tmp_path / "jpaged-0-py3-none-any.whl")
    assert script.main([wheel, "--only", "bad", "good"]) == 1
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()] == ["FAILED", "ok"]
    assert "NameError" in told.err
    assert script.main([wheel, "--only", "good"]) == 0
    with pytest.raises(SystemExit):
        script.main([wheel, "--only", "nonesuch"])


def test_the_shell_commands_of_a_page_are_tried_too_beside_the_models_it_names(scripts, tmp_path, monkeypatch, capsys):
    script, _ = scripts
    (tmp_path / "page.md").write_text("# Page\n\n    pip install nothing\n    test -d .venv && nonesuch\n")
    (tmp_path / "model.md").write_text("# Model\n\n    test -f org/model/config.json\n")

    def make_stand_ins(python, folder, variables):
        (folder / "org" / "model").mkdir(parents=True)
        (folder / "org" / "model" / "config.json").write_text("{}")

    monkeypatch.setattr(script, "guides", lambda: [tmp_path / "page.md", tmp_path / "model.md"])
    monkeypatch.setattr(script, "environment", lambda folder, *packages: Path(sys.executable))
    monkeypatch.setattr(script, "make_stand_ins", make_stand_ins)
    assert script.main([str(tmp_path / "jpaged-0-py3-none-any.whl"), "--only", "page", "model"]) == 1
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()] == ["ok", "FAILED", "ok", "ok"]
    assert "nonesuch: command not found" in told.err


def test_a_notebook_that_takes_too_long_fails_and_the_limit_is_told(scripts, tmp_path, monkeypatch, capsys):
    script, _ = scripts
    monkeypatch.setattr(script, "notebooks", lambda: [tmp_path / "1_slow.ipynb"])
    monkeypatch.setattr(script, "environment", lambda folder, *packages: Path(sys.executable))
    monkeypatch.setattr(script, "NOTEBOOK", "")
    asked = [str(tmp_path / "jpaged-0-py3-none-any.whl"), "--only", "1_slow"]
    assert script.main(asked) == 0
    monkeypatch.setattr(script, "NOTEBOOK", "import time; time.sleep(0.2)")
    assert script.main([*asked, "--most-minutes", "0.002"]) == 1
    told = capsys.readouterr()
    assert "FAILED" in told.out and "the limit is 0.002" in told.err
    with pytest.raises(SystemExit):
        script.main([*asked, "--most-minutes", "0"])


def test_pages_are_tried_in_empty_folders_and_find_nothing_that_was_there_before(scripts, tmp_path, monkeypatch):
    script, _ = scripts
    look = (
        "import os\nassert os.listdir() == []\nassert not os.path.exists(os.environ['XDG_CACHE_HOME'])\n"
        "open('left', 'w').close()"
    )
    for name in ("first", "second"):
        (tmp_path / f"{name}.md").write_text(f"# {name}\n\n```python\n{look}\n```\n")
    monkeypatch.setattr(script, "guides", lambda: [tmp_path / "first.md", tmp_path / "second.md"])
    monkeypatch.setattr(script, "environment", lambda folder, *packages: Path(sys.executable))
    monkeypatch.setattr(script, "make_stand_ins", lambda python, folder, variables: folder.mkdir())
    assert script.main([str(tmp_path / "jpaged-0-py3-none-any.whl"), "--only", "first", "second"]) == 0


def test_pytorch_is_of_the_version_that_judges_models_in_the_tests(scripts):
    script, _ = scripts
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert script.TORCH in project["optional-dependencies"]["test"]


def test_a_start_above_the_limit_fails_and_says_which(scripts, monkeypatch, capsys):
    _, script = scripts
    monkeypatch.setattr(script, "cpu_seconds", lambda arguments: 0.1 * len(arguments))
    assert script.main(["--runs", "3", "--most", "0.25", "--most-help", "0.35"]) == 0
    assert script.main(["--runs", "3", "--most", "0.15", "--most-help", "0.2"]) == 1
    assert capsys.readouterr().err.count("is more than") == 2


def test_a_process_is_timed_and_one_that_fails_is_no_measurement(scripts):
    _, script = scripts
    assert script.cpu_seconds(["-c", "pass"]) > 0
    with pytest.raises(RuntimeError, match="ended with 3"):
        script.cpu_seconds(["-c", "raise SystemExit(3)"])

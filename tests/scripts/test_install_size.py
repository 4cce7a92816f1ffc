"""What an installation takes is counted by package, from the files that each says are its own."""

from __future__ import annotations

import importlib.util
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install_size.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("install_size", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_package(python: Path, name: str, files: dict[str, int]) -> None:
    """Put a distribution with files of so many bytes into an environment."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    info = packages / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for file, size in files.items():
        (packages / file).write_bytes(b"x" * size)
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture
def python(tmp_path):
    """The Python of an environment with two packages and what comes with every one."""
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    add_package(python, "large", {"large.so": 3_000_000, "large.pyc": 500_000})
    add_package(python, "small", {"small.py": 1_000_000})
    add_package(python, "pip", {"pip.py": 9_000_000})
    return python


def test_packages_are_told_by_size_without_bytecode_and_what_comes_with_every_environment(script, python):
    assert script.sizes(python) == {"large": 3_000_000, "small": 1_000_000}


def test_the_largest_come_first_below_the_total(script):
    shown = script.table({"b": 1_000_000, "a": 1_000_000, "c": 2_500_000}, largest=2)
    assert [line.split() for line in shown.splitlines()] == [
        ["4.5", "MB", "3", "packages"],
        ["2.5", "MB", "c"],
        ["1.0", "MB", "a"],
    ]


def test_more_than_allowed_fails_and_says_by_how_much(script, python, capsys):
    assert script.main(["--environment", str(python), "--most", "4"]) == 0
    assert script.main(["--environment", str(python), "--most", "3.9"]) == 1
    assert "4.0 MB is more than --most 3.9" in capsys.readouterr().err

"""What users may rely on changes only when somebody says so, and is explained where they look for it."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jpaged

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"jax", "jaxlib", "flax", "transformers", "numba", "numpy", "torch", "fastapi", "PIL", "ray", "rich"}
"""Packages that take long to import, none of which a look at the help should wait for."""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("public_api_script", ROOT / "scripts" / "public_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_public_name_or_signature_changed_unannounced(script):
    kept, found = script.FILE.read_text(encoding="utf-8"), script.public_api()
    changes = "\n".join(
        difflib.unified_diff(kept.splitlines(), found.splitlines(), "announced", "found", lineterm="", n=0)
    )
    assert not changes, (
        f"{changes}\n\nThe public API is another. If that is meant: python scripts/public_api.py --write, a line in "
        "CHANGELOG.md, and warn of a name that goes away for one minor version first."
    )


def test_a_name_an_argument_a_default_and_a_setting_that_change_are_found(script, monkeypatch):
    class LLM(jpaged.LLM):
        def close(self, now: bool = True) -> None:
            """Close it."""

        def added(self) -> None:
            """Do nothing."""

    LLM.__module__ = "jpaged.llm"
    before = set(script.public_api().splitlines())
    assert "LLM.close(self) -> 'None'" in before and "setting block_size: int | None = None" in before
    monkeypatch.setattr(jpaged, "LLM", LLM)
    after = set(script.public_api().splitlines())
    assert {"LLM.close(self, now: 'bool' = True) -> 'None'", "LLM.added(self) -> 'None'"} <= after - before
    monkeypatch.setattr(jpaged, "__all__", [name for name in jpaged.__all__ if name != "NGram"])
    assert "class NGram(Speculative)" in before - set(script.public_api().splitlines())


def test_every_public_class_and_method_says_what_it_is():
    silent = []
    for name in jpaged.__all__:
        value = getattr(jpaged, name)
        if not inspect.isclass(value):
            continue
        members = [
            (member, inspect.getattr_static(value, member)) for member in dir(value) if not member.startswith("_")
        ]
        called = [member for member, found in members if inspect.isroutine(found) or isinstance(found, property)]
        ours = [
            member for member in called if any(member in vars(b) for b in value.__mro__ if "jpaged" in b.__module__)
        ]
        silent += [f"{name}.{member}" for member in ours if not inspect.getdoc(getattr(value, member))]
        silent += [name] if not value.__doc__ or value.__doc__.startswith(f"{name}(") else []
    assert silent == []


def test_type_checkers_see_what_is_loaded_lazily():
    """A name that is only in the table of homes is `Any` to mypy and pyright."""
    source = (ROOT / "jpaged" / "__init__.py").read_text()
    for name, home in jpaged._HOMES.items():
        assert any(f"{name}," in line or line.endswith(name) for line in source.splitlines() if "import" in line), name
        assert (ROOT / (home.replace(".", "/") + ".py")).exists() or (ROOT / home.replace(".", "/")).is_dir(), home
    assert {*jpaged._HOMES, "__version__"} == set(jpaged.__all__)


@pytest.mark.parametrize("given", [None, ["--help"], ["--version"], ["generate", "--help"], ["serve", "--help"]])
def test_a_look_at_the_package_imports_nothing_heavy(given):
    """`import jpaged` starts no backend, and the command line is asked for help more often than for an answer."""
    lines = ["import sys", "import jpaged"]
    if given is not None:
        lines += [f"sys.argv = {['jpaged', *given]!r}", "from jpaged.cli.main import app"]
        lines += ["try: app()", "except SystemExit as end: assert not end.code, end.code"]
    lines += [f"print('HEAVY', *sorted({HEAVY!r} & set(sys.modules)))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "HEAVY"

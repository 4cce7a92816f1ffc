"""Finds what loops are made from as Python's own parser does."""

import ast
from pathlib import Path

import pytest

import pallas_kernels
from pallas_kernels import sources


@pytest.fixture
def small_package(tmp_path, monkeypatch):
    """Files of a package in place of this one's: loops.py imports used.py, which imports deep.py in a function."""
    forget()
    monkeypatch.setattr(sources, "_ROOT", tmp_path)
    package = tmp_path / "pallas_kernels"
    package.mkdir()
    (package / "loops.py").write_text("from pallas_kernels.used import (\n    one,\n    two,\n)\n")
    (package / "used.py").write_text("def one():\n    from pallas_kernels import deep, three\n")
    for name in ("deep", "unrelated"):
        (package / f"{name}.py").write_text("")
    yield package
    forget()


def forget():
    for name in ("_source", "_imports"):
        getattr(sources, name).cache_clear()


def test_a_module_is_made_from_what_it_imports_at_its_top_or_in_a_function(small_package):
    assert sources.closure(["pallas_kernels.loops"]) == {f"pallas_kernels.{name}" for name in ("loops", "used", "deep")}


def test_other_packages_are_not_looked_at(small_package):
    (small_package.parent / "of_a_user.py").write_text("")
    assert sources.closure(["of_a_user"]) == set()


def test_the_digest_is_another_one_when_a_file_changes(small_package):
    modules = ["pallas_kernels.deep", "pallas_kernels.loops"]
    before = sources.digest(modules)
    (small_package / "unrelated.py").write_text("# edited")
    forget()
    assert sources.digest(modules) == before
    (small_package / "deep.py").write_text("# edited")
    forget()
    assert sources.digest(modules) != before


def test_imports_are_found_as_the_parser_finds_them():
    package = Path(pallas_kernels.__file__).parent
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        named = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        expected = {name for name in named if name.split(".")[0] == "pallas_kernels"}
        assert expected <= sources._imports(module), module

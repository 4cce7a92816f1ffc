"""Users install the whole tree, under one version: the wheel and the sdist, built as a release builds them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path, PurePosixPath

import pytest

import jpaged

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"jpaged": "jpaged", "pallas_kernels": "pallas_kernels", "models": "jpaged_models"}
"""Folder of the tree, and the package it installs as."""
BUILT_FROM = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"]


def copy_tree(target: Path) -> Path:
    """Copy what a build reads: a build writes beside its sources, and takes what an earlier one left there."""
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, target / name)
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def build(source: Path, target: Path, kind: str, umask: int = 0o022) -> tuple[Path, str]:
    """Build ``sdist`` or ``wheel`` without the network; return the file and what was printed."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, umask=umask)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = target.iterdir()
    return file, done.stdout + done.stderr


def files_of(tree: Path) -> set[str]:
    """Name every file that the packages of a source tree hold, as it is to be installed."""
    return {
        str(PurePosixPath(package, *path.relative_to(tree / folder).parts))
        for folder, package in SOURCES.items()
        for path in (tree / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return copy_tree(tmp_path_factory.mktemp("source"))


def unpack(file: Path, folder: Path) -> Path:
    """Unpack an sdist; return its top folder."""
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"jpaged-{jpaged.__version__}"


@pytest.fixture(scope="module")
def sdist_file(source, tmp_path_factory):
    return build(source, tmp_path_factory.mktemp("sdist"), "sdist")[0]


@pytest.fixture(scope="module")
def sdist(sdist_file, tmp_path_factory):
    """The unpacked sdist."""
    return unpack(sdist_file, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that the sdist builds, and what was printed meanwhile."""
    return build(sdist, tmp_path_factory.mktemp("wheel"), "wheel")


def test_the_wheel_holds_every_file_of_the_packages(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        names = archive.namelist()
    installed = {name for name in names if ".dist-info/" not in name}
    assert installed == files_of(ROOT)
    assert {"jpaged/py.typed", "jpaged/planning/shapes/llama-3.1-8b.json", "jpaged_models/llama.py"} <= installed


def test_the_sdist_holds_every_file_of_the_packages_and_no_tests(sdist):
    assert files_of(sdist) == files_of(ROOT)
    assert not (sdist / "tests").exists()


def test_a_package_added_anywhere_is_in_the_wheel_with_nothing_to_edit(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    copy_tree(source)
    for folder in SOURCES:
        package = source / folder / "added" / "below"
        package.mkdir(parents=True)
        for init in (package, package.parent):
            (init / "__init__.py").touch()
    file, _ = build(source, tmp_path / "wheel", "wheel")
    with zipfile.ZipFile(file) as archive:
        assert {f"{name}/added/below/__init__.py" for name in SOURCES.values()} <= set(archive.namelist())


def test_a_build_warns_of_nothing(wheel):
    """But for compiling to bytecode, which an install does."""
    said = [line for line in wheel[1].splitlines() if "warning" in line.lower() and "byte-compiling" not in line]
    assert said == []


def test_the_version_is_that_of_the_package(wheel):
    assert wheel[0].name == f"jpaged-{jpaged.__version__}-py3-none-any.whl"


def test_another_checkout_builds_the_same_bytes(sdist_file, wheel, tmp_path, monkeypatch):
    """Its files are of another time, its folders were written in another order, and their owner shares with nobody."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    tree = tmp_path / "another"
    tree.mkdir()
    copy_tree(tree)
    for number, path in enumerate(sorted(path for path in tree.rglob("*") if path.is_file())):
        path.chmod(0o600)
        os.utime(path, (1e9 + number, 1e9 + number))
    again, _ = build(tree, tmp_path / "sdist", "sdist", umask=0o077)
    assert again.read_bytes() == sdist_file.read_bytes()
    (tmp_path / "unpacked").mkdir()
    built, _ = build(unpack(again, tmp_path / "unpacked"), tmp_path / "wheel", "wheel", umask=0o077)
    assert built.read_bytes() == wheel[0].read_bytes()


def test_a_wheel_with_loops_compiled_ahead_has_them_and_is_for_one_platform(tmp_path, monkeypatch):
    source, objects = tmp_path / "source", tmp_path / "objects"
    source.mkdir()
    objects.mkdir()
    names = {f"{name}{ending}" for name in ("aarch64-dotprod", "aarch64-more") for ending in (".so", ".json")}
    for name in names:
        described = {"processor": {"machine": "aarch64"}, "glibc": "2.27" if "more" in name else "2.17"}
        (objects / name).write_text(json.dumps(described))
    monkeypatch.setenv("JPAGED_OBJECTS", str(objects))
    file, _ = build(copy_tree(source), tmp_path / "wheel", "wheel")
    assert file.name == f"jpaged-{jpaged.__version__}-py3-none-manylinux_2_27_aarch64.whl"
    with zipfile.ZipFile(file) as archive:
        assert {f"pallas_kernels/objects/{name}" for name in names} <= set(archive.namelist())
        assert "jpaged/__init__.py" in archive.namelist()
    assert "cpu" in metadata(file).get_all("Provides-Extra") and 'extra == "cpu"' not in required(file)


def test_without_loops_compiled_ahead_the_extra_for_cpus_needs_numba(wheel):
    assert 'numba>=0.61; extra == "cpu"' in required(wheel[0])


def metadata(file):
    """The metadata of a wheel."""
    with zipfile.ZipFile(file) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(path))


def required(file):
    """Return the requirements of a wheel, a line each."""
    return "\n".join(metadata(file).get_all("Requires-Dist"))


def test_dir_names_what_users_import_before_anything_is_loaded():
    code = "import sys, jpaged; print(*dir(jpaged)); assert 'jpaged.llm' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert shown == sorted(jpaged.__all__)
    assert all(hasattr(jpaged, name) for name in shown)

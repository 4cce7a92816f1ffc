"""What Numba compiled is kept on disk, found by later processes, and used by none that it is not for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from some_kernels import computed

from pallas_kernels import cpu_objects, kept_objects

MODULE = "pallas_kernels.row_ops.cpu_kernel"
KEY = cpu_objects.call_key(MODULE, "norm_target", ())
COMPUTE = """
import sys
import numpy as np
from some_kernels import computed

np.savez(sys.argv[1], *computed())
assert ("numba" in sys.modules) == (sys.argv[2] == "compiles"), sys.argv[2]
"""


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """An empty folder to keep code in."""
    monkeypatch.setenv(kept_objects.VARIABLE, str(tmp_path / "kept"))
    kept_objects.folder.cache_clear()
    yield tmp_path / "kept"
    kept_objects.folder.cache_clear()


def test_a_second_process_computes_the_same_without_numba(tmp_path):
    root = Path(__file__).resolve().parents[2]
    variables = {"PYTHONPATH": str(root), kept_objects.VARIABLE: str(tmp_path / "kept"), cpu_objects.VARIABLE: "none"}
    options = {"env": os.environ | variables, "cwd": Path(__file__).parent, "capture_output": True, "text": True}
    for what in ("compiles", "loads"):
        done = subprocess.run([sys.executable, "-c", COMPUTE, str(tmp_path / what), what], **options)
        assert done.returncode == 0, done.stderr[-3000:]
        found = np.load(tmp_path / f"{what}.npz")
        for array, expected in zip(found.values(), computed(), strict=True):
            np.testing.assert_array_equal(array, expected)


def test_nothing_is_found_where_nothing_was_kept(kept):
    assert kept_objects.registered(MODULE, KEY) is None


@pytest.mark.parametrize("content", [b"", b"[", b'["name", "checksum of something else"]\ncode'])
def test_a_damaged_file_is_as_good_as_none(kept, content):
    path = kept_objects.path_of(MODULE, KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert kept_objects.registered(MODULE, KEY) is None


def test_code_is_kept_in_a_folder_of_its_sources_compiler_and_processor(kept, monkeypatch):
    path = kept_objects.path_of(MODULE, KEY)
    assert path.parent.parent == kept and path == kept_objects.path_of(MODULE, KEY)
    assert kept_objects.path_of(MODULE, KEY + "more").parent == path.parent
    for name, value in (("digest", lambda modules: "edited"), ("_compiler", lambda: "another")):
        with monkeypatch.context() as other:
            other.setattr(kept_objects, name, value)
            kept_objects.folder.cache_clear()
            assert kept_objects.path_of(MODULE, KEY).parent != path.parent
        kept_objects.folder.cache_clear()


@pytest.mark.parametrize(
    ("module", "name"), [("numba", "0.0.1"), ("llvmlite", "0.0.1"), ("NUMBA_CPU_NAME", "generic"), ("NUMBA_OPT", "1")]
)
def test_another_compiler_and_what_it_is_told_are_another_folder(monkeypatch, module, name):
    kept_objects._compiler.cache_clear()
    before = kept_objects._compiler()
    real = kept_objects.version
    if module.isupper():
        monkeypatch.setenv(module, name)
    else:
        monkeypatch.setattr(kept_objects, "version", lambda one: name if one == module else real(one))
    kept_objects._compiler.cache_clear()
    assert kept_objects._compiler() != before
    kept_objects._compiler.cache_clear()


def test_code_of_other_packages_is_not_kept(kept):
    assert kept_objects.path_of("of_a_user", "of_a_user:target()") is None
    kept_objects.keep("of_a_user", "of_a_user:target()", "name", b"code")
    assert not kept.exists()


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, caplog):
    monkeypatch.setenv(kept_objects.VARIABLE, "/proc/nowhere")
    kept_objects.folder.cache_clear()
    with kept_objects.alone(MODULE, KEY):
        kept_objects.keep(MODULE, KEY, "name", b"code")
    kept_objects.folder.cache_clear()
    assert "NUMBA_CACHE_DIR chooses a folder" in caplog.text


def test_a_full_disk_leaves_no_file(kept, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_objects.os, "replace", full)
    kept_objects.keep(MODULE, KEY, "name", b"code")
    assert not list(kept.rglob("*.*")) and "No space left on device" in caplog.text


def test_a_dozen_loops_that_cannot_be_kept_are_one_warning(kept, caplog):
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("a file where the folder should be")
    for number in range(12):
        kept_objects.keep(MODULE, f"{KEY}{number}", "name", b"code")
    (warning,) = caplog.messages
    assert warning.startswith(f"compiled loops cannot be kept in {kept}: ") and kept_objects.VARIABLE in warning

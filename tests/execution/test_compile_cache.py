"""The compilation cache: on where it can be, off with a warning where it cannot."""

from __future__ import annotations

import shutil
import warnings

import jax
import platformdirs
import pytest

from jpaged.execution.compile import cache
from jpaged.execution.compile.cache import enable_compilation_cache


@pytest.fixture(autouse=True)
def settings():
    """JAX's own, put back afterwards."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def choose(folder):
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))


def test_it_is_in_the_users_cache_folder_unless_one_was_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    choose(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert enable_compilation_cache() == str(tmp_path / "jpaged" / "xla")
        choose(tmp_path / "mine")
        assert enable_compilation_cache() == str(tmp_path / "mine")
        choose("gs://bucket/folder")
        assert enable_compilation_cache() == "gs://bucket/folder"


@pytest.mark.parametrize("own", [True, False])
def test_a_folder_that_cannot_be_written_is_told_and_not_used(tmp_path, monkeypatch, own):
    (tmp_path / "file").touch()
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "file" / name))
    choose(tmp_path / "file" / "mine" if own else None)
    with pytest.warns(
        UserWarning, match="cannot be kept in .*Every start compiles anew; set JAX_COMPILATION_CACHE_DIR"
    ):
        assert enable_compilation_cache() is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert jax.jit(lambda x: x + 41)(1) == 42


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: usage._replace(free=3 << 20))
    choose(tmp_path)
    with pytest.warns(UserWarning, match="3 MiB are free, below 256"):
        assert enable_compilation_cache() is None

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jpaged.execution.compile.cache import compiled_anew
from jpaged.execution.compile.program import Program
from jpaged.execution.compile.recent import CompiledProgram, recent_programs
from jpaged.execution.compile.store import (
    CALLS,
    LOOPS,
    MANIFEST,
    ProgramStore,
    free_folder,
    program_name,
    read_manifest,
)

FACTS = {"code": "abc", "sizes": [1, 2]}
X = np.arange(6, dtype=np.float32)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:1]), ("tensor",))


@pytest.fixture(autouse=True)
def compiled_here():
    """What XLA's cache on disk gives cannot be written again."""
    recent_programs.clear()
    with compiled_anew():
        yield
    recent_programs.clear()


def double(x, *, by):
    return {"twice": x * by}


def written(folder, mesh):
    store = ProgramStore(folder, mesh, FACTS)
    program = Program(jax.jit(double, static_argnames="by"), lambda _: None, kind="double", store=store)
    program(("double", 6), X, by=2)
    assert store.write() > 0
    return folder


class Untraceable:
    """Fails where it would be traced."""

    def lower(self, *args, **static):
        raise AssertionError("traced again")


def test_a_program_that_was_written_is_loaded_and_not_traced(tmp_path, mesh):
    folder = written(tmp_path / "programs", mesh)
    store = ProgramStore.read(folder, mesh, FACTS)
    told = []
    program = Program(Untraceable(), told.append, kind="double", store=store)
    np.testing.assert_array_equal(program(("double", 6), X, by=2)["twice"], X * 2)
    assert store.num_found == 1 and told == [("double", 6)]
    assert program.out_info["twice"].shape == (6,)


@pytest.mark.parametrize(
    ("kind", "key", "arg", "by"),
    [
        ("other", ("double", 6), X, 2),
        ("double", ("double", 7), X, 2),
        ("double", ("double", 6), X[:5], 2),
        ("double", ("double", 6), X.astype(np.int32), 2),
        ("double", ("double", 6), X, 3),
    ],
)
def test_another_function_shape_dtype_or_static_argument_is_another_program(kind, key, arg, by, tmp_path, mesh):
    store = ProgramStore.read(written(tmp_path / "programs", mesh), mesh, FACTS)
    program = Program(jax.jit(double, static_argnames="by"), lambda _: None, kind=kind, store=store)
    np.testing.assert_array_equal(program(key, arg, by=by)["twice"], arg * by)
    assert store.num_found == 0


def test_programs_of_another_engine_are_refused_by_what_differs(tmp_path, mesh):
    folder = written(tmp_path / "programs", mesh)
    with pytest.raises(ValueError, match=r"compiled for sizes=\[1, 2\], and this engine has \[1, 3\]"):
        ProgramStore.read(folder, mesh, FACTS | {"sizes": [1, 3]})
    with pytest.raises(ValueError, match=r"compiled for more=None, and this engine has 1: .* `LLM\.compile_programs`"):
        ProgramStore.read(folder, mesh, FACTS | {"more": 1})


def test_a_damaged_or_lost_file_is_refused(tmp_path, mesh):
    folder = written(tmp_path / "programs", mesh)
    (name,) = read_manifest(folder)["files"].keys() - {CALLS, LOOPS}
    data = (folder / name).read_bytes()
    store = ProgramStore.read(folder, mesh, FACTS)
    (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"damaged: {name} has another checksum"):
        store.find(name, (X,))
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"lacks {name}"):
        store.find(name, (X,))


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", json.dumps({"format": 99, "facts": {}, "files": {}})])
def test_a_folder_without_a_manifest_of_this_format_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="compiled_programs="):
        read_manifest(tmp_path)


def test_a_folder_of_something_else_is_not_replaced(tmp_path, mesh):
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match="holds no compiled programs"):
        ProgramStore(tmp_path, mesh, FACTS).write()
    assert (tmp_path / "thesis.txt").read_text() == "years"


def test_programs_written_again_replace_those_before(tmp_path, mesh):
    folder = written(tmp_path / "programs", mesh)
    store = ProgramStore(folder, mesh, FACTS)
    compiled = jax.jit(jnp.sin).lower(X)
    store.keep("a" * 40, CompiledProgram(compiled.compile(), compiled.out_info))
    store.write()
    assert read_manifest(folder)["files"].keys() - {CALLS, LOOPS} == {"a" * 40}
    assert {path.name for path in folder.iterdir()} - {CALLS, LOOPS} == {"a" * 40, MANIFEST}


def test_a_folder_that_has_more_than_its_programs_is_not_replaced(tmp_path, mesh):
    folder = written(tmp_path / "programs", mesh)
    (folder / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match=r"holds thesis\.txt besides compiled programs"):
        free_folder(folder)


@pytest.mark.parametrize("text", ["[]", '{"channels": []}'])
def test_a_folder_with_somebody_elses_manifest_is_not_replaced(text, tmp_path, mesh):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(FileExistsError, match="holds no compiled programs"):
        ProgramStore(tmp_path, mesh, FACTS).write()
    assert (tmp_path / MANIFEST).read_text() == text


def test_a_folder_of_an_earlier_format_may_be_replaced(tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 1, "facts": {}, "files": {"a": "0"}}))
    (tmp_path / "a").touch()
    assert free_folder(tmp_path) == tmp_path.resolve()


def test_a_link_is_followed_and_the_folder_that_one_stands_in_has_a_name(tmp_path, mesh, monkeypatch):
    (tmp_path / "programs").mkdir()
    (tmp_path / "link").symlink_to("programs")
    written(tmp_path / "link", mesh)
    assert (tmp_path / "link").is_symlink() and read_manifest(tmp_path / "programs")["files"]
    monkeypatch.chdir(tmp_path / "programs")
    written(Path("."), mesh)
    assert {path.name for path in tmp_path.iterdir()} == {"link", "programs"}


def test_what_cannot_be_written_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "programs"):
        with pytest.raises(OSError, match=f"{tmp_path}/file.* (is no folder|cannot be written)"):
            free_folder(place)
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: str(path).endswith("disk"))
    with pytest.raises(OSError, match="disk is a mount point"):
        free_folder(tmp_path / "disk")


def test_programs_outlive_a_failure_to_replace_them(tmp_path, mesh, monkeypatch):
    folder = written(tmp_path / "programs", mesh)
    before = read_manifest(folder)
    rename = Path.rename

    def interrupted(path, target):
        if target == folder and not path.name.endswith(".old"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ProgramStore(folder, mesh, FACTS).write()
    assert read_manifest(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["programs"]


def test_a_name_follows_from_shapes_and_not_from_values():
    first = program_name("step", ("step", 1), (X, {"a": X}), {})
    assert first == program_name("step", ("step", 1), (X + 1, {"a": X * 3}), {})
    assert first != program_name("step", ("step", 1), (X, {"b": X}), {})

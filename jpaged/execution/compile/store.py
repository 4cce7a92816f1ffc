"""Keeps compiled programs in a folder, so that an engine made from it traces and compiles nothing that lies there.

A program follows from the code, the model's configuration, the engine's settings and the machine. `Facts` holds all of
these; a folder is read only where they are equal, so that a program found by its shapes is the one that would be
compiled. A folder is code: write access to it decides what the engine runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding

from jpaged.execution.compile.recent import CompiledProgram
from jpaged.new_folder import new_folder
from pallas_kernels.custom_calls import kept_loops, register_again, registrations

MANIFEST = "programs.json"
CALLS = "calls"
"""File of what made a CPU's custom calls known to XLA."""
LOOPS = "loops"
"""File of the code of these calls, so that a machine without it compiles none."""
FORMAT = 2

Facts = Mapping[str, Any]
"""All that decides what is compiled, besides shapes, as plain data by name."""


class ProgramStore:
    """Finds compiled programs in a folder, or collects programs to write one. Thread-safe.

    Attributes:
        folder: where the programs lie, or will.
        collects: whether programs are taken in, to be written.
        num_found: programs that were loaded so far.
        failed: whether a program could not be read since the folder was opened.
    """

    def __init__(self, folder: Path, mesh: Mesh, facts: Facts, files: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.collects = files is None
        self.num_found = 0
        self.failed = False
        self._mesh = mesh
        self._files = dict(files or {})
        self._facts = facts
        self._made: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._calls_are_known = False

    @classmethod
    def read(cls, folder: Path, mesh: Mesh, facts: Facts) -> ProgramStore:
        """Open the programs of a folder for an engine with these facts.

        Raises:
            ValueError: there are none, or they are of another engine; the message names what differs.
        """
        manifest = read_manifest(folder)
        for name in sorted({*facts, *manifest["facts"]}):
            check_fact(folder, name, manifest["facts"].get(name), facts.get(name))
        return cls(folder, mesh, facts, manifest["files"])

    def find(self, name: str, args: tuple[Any, ...]) -> CompiledProgram | None:
        """Return a program by its name (see `program_name`), loaded onto the mesh; None where there is none.

        Args:
            args: what the program takes, or its shapes.

        Raises:
            ValueError: the file is damaged or gone.
        """
        if name not in self._files:
            return None
        program, out_info = pickle.loads(_read(self.folder, self._files, name))
        with self._lock:
            if not self._calls_are_known:
                _make_known(self.folder, self._files)
            self._calls_are_known = True
        executable = serialize_executable.deserialize_and_load(
            program,
            jax.tree.structure((args, {})),
            jax.tree.structure(out_info),
            backend=self._mesh.devices.flat[0].client,
            execution_devices=list(self._mesh.devices.flat),
        )
        with self._lock:
            self.num_found += 1
        return CompiledProgram(executable, out_info)

    def keep(self, name: str, program: CompiledProgram) -> None:
        """Take a program in; `write` writes it. It has to come from the compiler: XLA cannot serialise again what its
        cache on disk gave."""
        data, _, _ = serialize_executable.serialize(program.executable)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), program.out_info)
        with self._lock:
            self._made[name] = pickle.dumps((data, shapes))

    def write(self) -> int:
        """Write what was taken in, whole or not at all, and return how many bytes that is. An older folder of programs
        is replaced; a process killed during the exchange may leave the old and the new folder next to it, under names
        that begin with a dot.

        Raises:
            FileExistsError: the folder holds something else.
            OSError: the disk refuses.
        """
        with new_folder(free_folder(self.folder), put=_put) as folder:
            written = self._made | _calls()
            for name, data in written.items():
                (folder / name).write_bytes(data)
            files = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(written.items())}
            manifest = {"format": FORMAT, "facts": self._facts, "files": files}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        return sum(map(len, self._made.values()))


def _put(new: Path, folder: Path) -> None:
    """Move a new folder to its path; a folder that was there is deleted afterwards."""
    old = new.with_name(f"{new.name}.old")
    try:
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _calls() -> dict[str, bytes]:
    """Return the files that hold this process's registrations of custom calls, by name; empty if there are none."""
    if not (made := registrations()):
        return {}
    return {CALLS: pickle.dumps(made), LOOPS: pickle.dumps(kept_loops(made))}


def make_calls_known(folder: Path) -> None:
    """Register the custom calls of a folder's programs for a CPU with XLA, which tracing did where they were compiled.

    Raises:
        ValueError: the folder has no readable manifest, or a file is damaged or gone.
    """
    _make_known(folder, read_manifest(folder)["files"])


def _make_known(folder: Path, files: Mapping[str, str]) -> None:
    if CALLS in files:
        loops = pickle.loads(_read(folder, files, LOOPS)) if LOOPS in files else {}
        register_again(pickle.loads(_read(folder, files, CALLS)), loops)


def _read(folder: Path, files: Mapping[str, str], name: str) -> bytes:
    """Return the content of a file of a folder, checked.

    Args:
        files: checksums by name, of the manifest.
    """
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise ValueError(f"compiled_programs={str(folder)!r} lacks {name}: {error}") from error
    if hashlib.sha256(data).hexdigest() != files[name]:
        raise ValueError(f"compiled_programs={str(folder)!r} is damaged: {name} has another checksum")
    return data


def check_fact(folder: Path, name: str, there: Any, needed: Any) -> None:
    """Raise ValueError where a folder's programs were compiled for another value of a fact than an engine has.

    Args:
        there: the value in the folder's manifest.
    """
    if there != (needed := json.loads(json.dumps(needed))):
        raise ValueError(
            f"compiled_programs={str(folder)!r} was compiled for {name}={there!r}, and this engine has {needed!r}: "
            "compile them again, by `jpaged compile` or, with a setting that it has no option for, "
            "`LLM.compile_programs`, or leave it out"
        )


def free_folder(folder: str | Path) -> Path:
    """Return the folder that programs are to be written to, links followed, before they are compiled.

    Raises:
        FileExistsError: it is a file, or holds something other than compiled programs.
        OSError: it is a mount point, or its parent, where the new folder is made first, cannot be written.
    """
    folder = Path(folder).resolve()
    if folder.exists():
        if not folder.is_dir():
            raise FileExistsError(f"{folder} exists and is no folder: choose another one")
        _check_replaceable(folder)
        if os.path.ismount(folder):
            raise OSError(f"{folder} is a mount point, which cannot be replaced whole: choose a folder below it")
    above = next(parent for parent in folder.parents if parent.exists())
    try:
        with tempfile.TemporaryDirectory(dir=above):
            pass
    except OSError as error:
        raise OSError(f"{folder} cannot be written: {error}") from error
    return folder


def _check_replaceable(folder: Path) -> None:
    """Raise FileExistsError where a folder has files other than those that its manifest names."""
    there = {path.name for path in folder.iterdir()}
    if not there:
        return
    try:
        ours = {MANIFEST, *_parsed_manifest(folder)["files"]}
    except ValueError as error:
        raise FileExistsError(f"{folder} exists and holds no compiled programs: choose another folder") from error
    if others := sorted(there - ours):
        raise FileExistsError(f"{folder} holds {others[0]} besides compiled programs: choose another folder")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of programs.

    Raises:
        ValueError: it has no readable manifest, or one of another format.
    """
    manifest = _parsed_manifest(folder)
    found = manifest["format"]
    if found != FORMAT:
        raise ValueError(f"compiled_programs={str(folder)!r} is of format {found}, and this version reads {FORMAT}")
    return manifest


def _parsed_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder, of whatever format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["format"], dict(manifest["files"]), dict(manifest["facts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"compiled_programs={str(folder)!r} holds no programs of `jpaged compile`: {error}") from error
    return manifest


def program_name(kind: str, key: Hashable, args: tuple[Any, ...], static: Mapping[str, Any]) -> str:
    """Return the file name of a program: a hash of its key within the engine and of its shapes.

    Args:
        kind: which of the engine's functions it is.
        key: the shape's name among those of the function.
        args: arrays or their shapes.
        static: static arguments.
    """
    leaves, tree = jax.tree.flatten(args)
    shapes = [
        (np.shape(leaf), str(np.dtype(getattr(leaf, "dtype", type(leaf)))), _place(getattr(leaf, "sharding", None)))
        for leaf in leaves
    ]
    found = repr((kind, key, str(tree), shapes, sorted(static.items())))
    return hashlib.sha256(found.encode()).hexdigest()[:40]


def _place(sharding: Any) -> str:
    """Return how an array lies on its devices: the same for an array and its shape, here and on a compiler's target.

    An axis of one device cuts nothing: XLA's results leave it out of what the function was compiled with.
    """
    if sharding is None:
        return "host"
    if not isinstance(sharding, NamedSharding):
        return repr(sharding)
    sizes = sharding.mesh.shape
    names = ([each] if isinstance(each, str) else each or () for each in sharding.spec)
    cut = [[name for name in some if sizes[name] > 1] for some in names]
    while cut and not cut[-1]:
        cut.pop()
    return repr((tuple(sizes.items()), cut))

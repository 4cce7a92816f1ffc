"""Reads and writes saved states: a folder holds numbered saves, of which the newest counts.

    state/000007/state.json      format, model, pool, and the checksum of every other file; written last
    state/000007/host.msgpack    requests, tables, queues: plain data
    state/000007/blocks/         content of the pool's blocks, by Orbax

A save is written next to the others under a temporary name, flushed to disk and renamed, so an interrupted save leaves
the previous one. Then older saves are deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from jpaged.errors import StateRefused
from jpaged.loading.hugging_face import without_lines
from jpaged.loading.orbax.zarr_array import ZarrArray
from jpaged.scheduling.saving import plain_array

FORMAT = 5
"""Number of the format that is written. Increase it whenever data change their meaning, and with a release whose states
have entries that the version before does not know: it would meet them unprepared, not refuse the state."""
FORMATS_BEFORE = (3, 4)
"""Formats that are read too, without what came new; a state of another format is refused."""

ABOUT, HOST, BLOCKS = "state.json", "host.msgpack", "blocks"
_UNFINISHED = ".saving"
_CHARACTERS = "surrogatepass"  # users' text may hold lone surrogates


@dataclass(frozen=True)
class StateFiles:
    """A save that was read and whose files match their checksums.

    Attributes:
        path: its folder.
        about: the content of state.json, see `jpaged.engine.saved_state.keeper`.
        host: the plain data.
    """

    path: Path
    about: dict[str, Any]
    host: dict[str, Any]

    def array(self, name: str) -> np.ndarray:
        """Return an array of the blocks; its file is memory-mapped."""
        return read_array(self.path, name)


def write_state(
    folder: Path, about: Mapping[str, Any], host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> int:
    """Write a save into a folder, which is created if missing, and return its size in bytes.

    Raises:
        OSError: writing fails, or `folder` is a file; the previous save stays as it was.
    """
    folder = folder.absolute()
    if folder.is_file():
        raise NotADirectoryError(f"{str(folder)!r} is a file: a state is saved to a folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    saves = _saves(folder)
    path = folder / f"{max(saves, default=0) + 1:06d}"
    new = path.with_name(path.name + _UNFINISHED)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)  # it holds users' texts
    try:
        (new / HOST).write_bytes(msgpack.packb(host, default=plain_array, unicode_errors=_CHARACTERS))
        if arrays:
            _write_arrays(new / BLOCKS, arrays)
        checksums = {str(file.relative_to(new)): _checksum(file) for file in _files(new)}
        said = {"format": FORMAT, **about, "checksums": checksums}
        (new / ABOUT).write_text(json.dumps({**said, "checksum": _of_json(said)}, indent=1))
        for file in _files(new):
            file.chmod(0o600)
        num_bytes = sum(_to_disk(file) for file in _files(new))
        os.rename(new, path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _to_disk(folder)
    for number in saves:
        shutil.rmtree(folder / f"{number:06d}", ignore_errors=True)
    for left in folder.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(left, ignore_errors=True)
    return num_bytes


def read_state(folder: Path) -> StateFiles:
    """Read the newest save of a folder and check all of its files.

    Raises:
        StateRefused: there is none, or it is damaged or of another format; the message says which.
    """
    path = newest(folder)
    about = read_about(path)
    found = {str(file.relative_to(path)) for file in _files(path)} - {ABOUT}
    for name in sorted(found ^ set(about["checksums"])):
        raise StateRefused(f"{path} is damaged: {name} is {'not one of its files' if name in found else 'missing'}")
    for name, checksum in about["checksums"].items():
        if _checksum(path / name) != checksum:
            raise StateRefused(f"{path} is damaged: the checksum of {name} is not the one it was written with")
    host = msgpack.unpackb((path / HOST).read_bytes(), strict_map_key=False, unicode_errors=_CHARACTERS)
    return StateFiles(path, about, host)


def read_array(path: Path, name: str) -> np.ndarray:
    """Return an array of a save's blocks; its file is memory-mapped."""
    return np.asarray(ZarrArray(path / BLOCKS / name))


def check_file(path: Path, about: Mapping[str, Any], array: str) -> None:
    """Check the files of one array of a save.

    Raises:
        StateRefused: a file is not what was written.
    """
    for name, checksum in about["checksums"].items():
        if name.startswith(f"{BLOCKS}/{array}/") and _checksum(path / name) != checksum:
            raise StateRefused(f"{path} is damaged: the checksum of {name} is not the one it was written with")


def newest(folder: Path) -> Path:
    """Return the newest save of a folder.

    Raises:
        StateRefused: there is none.
    """
    saves = _saves(folder)
    if not saves:
        raise StateRefused(f"{folder} has no saved state")
    return folder.absolute() / f"{max(saves):06d}"


def read_about(path: Path) -> dict[str, Any]:
    """Return a save's description of itself, the content of its state.json.

    Raises:
        StateRefused: there is no such save, its description is damaged, or it is of another format.
    """
    if not path.is_dir():
        raise StateRefused(f"{path} is not there")
    try:
        about = json.loads((path / ABOUT).read_bytes())
        checksum = about.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise StateRefused(f"{path} is damaged: {ABOUT} cannot be read: {error!r}") from error
    if checksum != _of_json(about):
        raise StateRefused(f"{path} is damaged: {ABOUT} is not what was written")
    known = (*FORMATS_BEFORE, FORMAT)
    if about["format"] not in known:
        raise StateRefused(
            f"{path} has state format {about['format']}, written by jpaged {about.get('jpaged')}; this version reads "
            f"{', '.join(map(str, FORMATS_BEFORE))} and {FORMAT}"
        )
    return about


def _saves(folder: Path) -> list[int]:
    """Return the numbers of the complete saves."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and (path / ABOUT).exists())


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp  # the import takes a second

    # Raw files: KV hardly compresses, and decompression would delay its reader.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=False)
    with without_lines("absl", "Skipping merge of OCDBT"), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(dict(arrays)))


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _of_json(data: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=16).hexdigest()


def _to_disk(path: Path) -> int:
    """Flush a file, or a folder's entries, to disk; return its size in bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot do it for folders
            os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)

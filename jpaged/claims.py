"""Claims folders and files for one process, so that no other one writes there meanwhile.

A claim is a lock of the file system: it ends with its process, however that ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from weakref import WeakValueDictionary

from filelock import FileLock, Timeout

_LOCK, _OWNER = ".lock", ".owner"
FILES = frozenset((_LOCK, _OWNER))
"""Names of a claimed folder's files that belong to the claim: the lock, and the number of the process that holds it."""


class InUse(OSError):
    """Another process, or another part of this one, has claimed the folder or file.

    Attributes:
        owner: what has, in words.
    """

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(f"{path} is used by {owner}: wait for its end, or choose another place")
        self.owner = owner


class Claim:
    """Holds a claim until `release`, or until nothing refers to it.

    Args:
        files: the claim's files, which `release` removes; those of a killed process stay, and mean nothing.
    """

    def __init__(self, lock: FileLock, *files: Path) -> None:
        self._lock = lock
        self._files = files

    def release(self) -> None:
        """Let others claim it. Calling it twice is harmless."""
        if self.is_held:
            for file in self._files:  # before the lock goes: afterwards they may be another claim's
                with suppress(OSError):
                    file.unlink(missing_ok=True)
        self._lock.release()

    @property
    def is_held(self) -> bool:
        """Tell whether it was not released."""
        return self._lock.is_locked

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


_folders: WeakValueDictionary[Path, Claim] = WeakValueDictionary()
"""Claims of `claim_folder` in this process, by folder."""


def claim_folder(folder: Path) -> Claim:
    """Claim a folder, which is created for its owner only if it is missing. This process may write there (`writing`).

    Raises:
        InUse: it is claimed.
        OSError: it cannot be written, or is a file.
    """
    claim = _locked(folder)
    _folders[folder.resolve()] = claim
    return claim


def holds_folder(folder: Path) -> bool:
    """Tell whether this process has claimed a folder by `claim_folder`."""
    claim = _folders.get(folder.resolve())
    return claim is not None and claim.is_held


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a folder meanwhile: claim it, unless this process has. A folder that was
    made for the claim is removed if nothing was written.

    Raises:
        InUse, OSError: see `claim_folder`.
    """
    if holds_folder(folder):
        yield
        return
    is_new = not folder.exists()
    try:
        with _locked(folder):
            yield
    finally:
        if is_new:
            with suppress(OSError):  # it holds what was written
                folder.rmdir()


def claim_file(file: Path) -> Claim:
    """Claim a file that may not exist yet. The lock is a hidden file next to it, as the file itself may be replaced.

    Raises:
        InUse: it is claimed.
        OSError: its folder cannot be written.
    """
    file = file.resolve()
    lock = file.with_name(f".{file.name}.lock")
    return Claim(_taken(lock, file, "another process"), lock)


def _locked(folder: Path) -> Claim:
    if folder.is_file():
        raise NotADirectoryError(f"{str(folder)!r} is a file: a state is saved to a folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = "another process"
    with suppress(OSError):
        owner = f"process {int((folder / _OWNER).read_text())}"
    claim = Claim(_taken(folder / _LOCK, folder, owner), folder / _OWNER, folder / _LOCK)
    try:
        (folder / _OWNER).write_text(f"{os.getpid()}\n")
    except OSError:
        claim.release()
        raise
    return claim


def _taken(file: Path, path: Path, owner: str) -> FileLock:
    lock = FileLock(file, mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InUse(path, owner) from None
    except NotImplementedError as error:
        raise OSError(f"{path} cannot be claimed, as its file system has no locks: choose another place") from error
    return lock

"""A file of a fixed size that keeps blocks of bytes, each with a checksum."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import UInt8

from jpaged.execution.transfer.tiers.block_journal import BlockJournal, NotMade, Record, remove_others
from jpaged.memory.tiers import StoredBlock

Bytes: TypeAlias = UInt8[np.ndarray, " bytes"]

SAMPLE = 16 << 20
"""Bytes that are written and read to measure a folder's speed."""

PIECE = 1 << 20
"""Bytes of the sample that are written or read at once."""

LATENCY_READS = 5
"""Reads of one page of memory each, of whose times the median is the latency."""

READY_SECONDS = 5.0
"""How long a process that can only read waits for files which another one is making."""


class DamagedBlock(Exception):
    """The bytes of a block are not those that were written under its name, or none were."""


class Speeds(NamedTuple):
    """Holds the measured speeds of a folder, checksums included.

    Attributes:
        write_rate, read_rate: bytes a second, to the disk and from it.
        latency: seconds until the first bytes of a read are there.
    """

    write_rate: float
    read_rate: float
    latency: float


class BlockFile:
    """Keeps blocks in a file without a name, which goes with this process, or in one with a journal, which stays.

    The whole size is reserved at once, so that a write finds its place on the disk; file systems that write copies
    (btrfs, ZFS) may be full all the same. So blocks are written and read by the system's calls, which tell of that, of
    a disk that fails and of a file that was cut; on a map each of them ends the process. One thread at a time may use
    it.

    Args:
        folder: where the file lies; made if it is not there.
        num_bytes: its size.
        identity: 16 bytes that stand for everything blocks depend on, of a file that stays; None = it has no name. The
            first process that opens it writes, others read, and one of them takes over when it ends.
        page_bytes: size of a large page.

    Raises:
        OSError: the folder cannot be written to, or has no room for so many bytes; or another process writes the file,
            in another size or not yet after `READY_SECONDS`.
    """

    def __init__(
        self, folder: str | Path, num_bytes: int, *, identity: bytes | None = None, page_bytes: int = 1
    ) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.num_bytes = num_bytes
        self._journal: BlockJournal | None = None
        self._sums: dict[int, bytes] = {}
        self._source = -1  # reads go on while another thread becomes the writer, see `fresh`
        if identity is None:
            self._file = tempfile.TemporaryFile(buffering=0, dir=folder, prefix="jpaged-")  # noqa: SIM115
        else:
            remove_others(Path(folder), identity)
            self._open_kept(Path(folder) / f"jpaged-{identity.hex()}", identity, page_bytes)
        try:
            if self.writes and os.fstat(self._file.fileno()).st_size != num_bytes:
                _reserve(self._file.fileno(), num_bytes)
            self._source = os.dup(self._file.fileno())
        except BaseException:
            self._close_files()
            raise

    def _open_kept(self, path: Path, identity: bytes, page_bytes: int) -> None:
        """Open the files that stay; while another process is making them, wait for it."""
        self._path = path.with_suffix(".blocks")
        deadline = time.monotonic() + READY_SECONDS
        while True:
            journal = None
            try:
                journal = BlockJournal(path.with_suffix(".list"), identity, self.num_bytes, page_bytes)
                self._file = _open(self._path, self.num_bytes, writes=journal.writes)
                break
            except BaseException as error:
                if journal is not None:
                    journal.close()
                if not isinstance(error, NotMade) or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)
        self._journal = journal
        self._sums = {record.block.place: record.checksum for record in journal.records}

    @property
    def writes(self) -> bool:
        """Tell whether this process writes the file."""
        return self._journal is None or self._journal.writes

    def fresh(self) -> tuple[bool, list[StoredBlock]]:
        """Return whether the writer began another journal, and the blocks that it added since the last call.

        If the writer has ended, this process becomes it, and all blocks are returned as another journal's.
        """
        journal = self._journal
        if journal is None or journal.writes:
            return False, []
        anew = journal.is_replaced()
        if journal.take_over():
            if not self._path.exists() or not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                journal.let_go()
                raise OSError(f"{self._path}: another process has put a file of another size in its place")
            self._file.close()
            self._file, anew = _open(self._path, self.num_bytes, writes=True), True
        if anew:
            journal.reopen()
        records = journal.records if anew else list(journal.fresh())
        self._sums.update((record.block.place, record.checksum) for record in records)
        return anew, [record.block for record in records]

    @property
    def blocks(self) -> list[StoredBlock]:
        """Return the blocks that the file had when it was opened, in the order in which they were written."""
        return [] if self._journal is None else [record.block for record in self._journal.records]

    def write(self, place: int, name: bytes, content: np.ndarray, stored: StoredBlock | None = None) -> None:
        """Write a block at an offset of the file, over its old content.

        Args:
            stored: what the journal is to say of it.

        Raises:
            OSError: the disk fails, or has no room; nothing can be read at that offset then.
        """
        flat = np.ascontiguousarray(content).reshape(-1)
        self._check(place, len(flat))
        self.forget(place)
        self._file.seek(place)
        left = flat.data
        while left:
            left = left[self._file.write(left) :]
        checksum = _checksum(name, flat)
        if self._journal is not None and stored is not None:
            self._journal.add(Record(stored, checksum))
        self._sums[place] = checksum

    def read(self, place: int, name: bytes, num_bytes: int) -> Bytes:
        """Return a block that was written under this name.

        Raises:
            DamagedBlock: it was not, its bytes have changed, or the file was cut.
            OSError: the disk fails.
        """
        self._check(place, num_bytes)
        content = np.empty(num_bytes, np.uint8)
        left = content.data
        while left and (found := os.preadv(self._source, [left], place + num_bytes - len(left))):
            left = left[found:]
        if left or self._sums.get(place) != _checksum(name, content):
            raise DamagedBlock(f"the {num_bytes} bytes at {place} are not those that were written")
        return content

    def will_read(self, place: int, num_bytes: int) -> None:
        """Tell the system that these bytes are read soon, so that it fetches them at once."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # a hint; the read tells of a disk that fails
                os.posix_fadvise(self._source, place, num_bytes, os.POSIX_FADV_WILLNEED)

    def forget(self, place: int) -> None:
        """Invalidate what was written at an offset."""
        self._sums.pop(place, None)
        if self._journal is not None:
            self._journal.forget(place)

    def give_back(self, place: int, num_bytes: int) -> None:
        """Do nothing: the file keeps its size."""

    def forget_all(self) -> None:
        """Invalidate all blocks written so far, for processes that start later too."""
        self._sums = {}
        if self._journal is not None:
            self._journal.clear()

    def measure(self) -> Speeds:
        """Write and read a sample, and forget it. The system's copy of it in memory is dropped in between, where the
        system allows that."""
        size = min(SAMPLE, self.num_bytes)
        pieces = [(start, min(PIECE, size - start)) for start in range(0, size, PIECE)]
        sample = np.frombuffer(np.random.default_rng(0).bytes(min(PIECE, size)), np.uint8)
        start = time.perf_counter()
        for place, length in pieces:
            self.write(place, b"sample", sample[:length])
        os.fsync(self._file.fileno())
        write_seconds = time.perf_counter() - start
        self._drop_from_memory(size)
        start = time.perf_counter()
        for place, length in pieces:
            self.will_read(place, length)
            self.read(place, b"sample", length)
        read_seconds = time.perf_counter() - start
        self._drop_from_memory(size)
        times = []
        for number in range(LATENCY_READS):
            start = time.perf_counter()
            os.pread(self._source, 1, number * (size // LATENCY_READS))
            times.append(time.perf_counter() - start)
        self.forget_all()
        return Speeds(size / write_seconds, size / read_seconds, median(times))

    def close(self) -> None:
        """Close the file, whose space is given back unless it stays; nothing can be read or written any more."""
        self._sums = {}
        self.num_bytes = 0
        self._close_files()

    def _close_files(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
        if self._source >= 0:
            os.close(self._source)
            self._source = -1
        if self._journal is not None:
            self._journal.close()

    def _check(self, place: int, num_bytes: int) -> None:
        if not 0 <= place <= place + num_bytes <= self.num_bytes:
            raise ValueError(f"{num_bytes} bytes at place={place} are outside the file's {self.num_bytes}")

    def _drop_from_memory(self, num_bytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, num_bytes, os.POSIX_FADV_DONTNEED)


def _open(path: Path, num_bytes: int, *, writes: bool) -> FileIO:
    """Open a file of blocks. A file of another size is replaced, not cut, because others may read it.

    Raises:
        NotMade: this process can only read, and the file does not have its size yet.
    """
    size = path.stat().st_size if path.exists() else None
    if not writes and size != num_bytes:
        raise NotMade(f"{path} has {size or 0:,} of {num_bytes:,} bytes: another process has not made it")
    if writes and size != num_bytes:
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
    return FileIO(path, "r+" if writes else "r")


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Make a file as large as that, with room on the disk for all of it.

    Raises:
        OSError: there is not so much.
    """
    if hasattr(os, "fstatvfs"):  # where the file system cannot reserve, the C library writes to every block instead
        there = os.fstatvfs(descriptor)
        if num_bytes > (free := there.f_bavail * there.f_frsize):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {num_bytes:,} bytes, {free:,} are free")
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    zeros = bytes(PIECE)
    for start in range(0, num_bytes, PIECE):
        os.write(descriptor, zeros[: num_bytes - start])


def _checksum(name: bytes, content: Bytes) -> bytes:
    hashed = blake2b(name, digest_size=16)
    hashed.update(content.data)
    return hashed.digest()

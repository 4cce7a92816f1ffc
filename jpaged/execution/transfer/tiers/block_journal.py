"""A file's list of its blocks, which outlives the process: one record for each block that was written, in order.

A record has a checksum; the first one that is cut or damaged ends the list. So a process may die at any moment. The
bytes of a block are written before its record, and are compared with the checksum in it whenever they are read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from jpaged.memory.tiers import StoredBlock

_HEADER = struct.Struct("<8s16sQQ")
_MAGIC = b"jpaged\x00\x02"
_RECORD = struct.Struct("<HQQ16s16sIi16sd")
_SUM = 8
_NO_TENANT = bytes(16)

SPARE = 1 << 20
"""Bytes of a list that may be of blocks overwritten since, in addition to as many as are of others."""


class Record(NamedTuple):
    """A block in the file.

    Attributes:
        checksum: of its name and bytes.
    """

    block: StoredBlock
    checksum: bytes


class NotMade(FileNotFoundError):
    """The process that writes has not made the files yet, or ended before it did."""


class BlockJournal:
    """The list of a file's blocks. The first process that opens it writes; others read what it writes, and one of them
    takes over when it ends.

    Args:
        path: the list's file; made if it is not there.
        identity: 16 bytes that stand for everything blocks depend on; a list of another identity or size is replaced by
            the writer.
        num_bytes: size of the file of blocks.
        page_bytes: size of a large page.

    Attributes:
        writes: whether this process is the writer.

    Raises:
        NotMade: this process can only read, and there is no list yet.
        OSError: it cannot be opened, or this process can only read and the list is of something else.
    """

    def __init__(self, path: Path, identity: bytes, num_bytes: int, page_bytes: int) -> None:
        self._path = path
        self._header = _HEADER.pack(_MAGIC, identity, num_bytes, page_bytes)
        self._page_bytes = page_bytes
        self._pages: dict[int, dict[int, Record]] = {}  # by page and place, the page first taken first
        self._live_bytes = 0
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        self._file, self.writes = -1, False
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.writes = True
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            self._file = os.open(self._path, (os.O_RDWR | os.O_CREAT) if self.writes else os.O_RDONLY, 0o600)
        except FileNotFoundError as error:
            raise NotMade(f"{self._path}: another process has not made it") from error
        self._end = _HEADER.size
        header = os.pread(self._file, _HEADER.size, 0)
        if header != self._header:
            if not self.writes:
                if not header:
                    raise NotMade(f"{self._path}: another process has not written it")
                raise OSError(f"{self._path} is of other blocks, and another process writes it")
            self._replace(())
            return
        list(self.fresh())
        if self.writes:
            os.fchmod(self._file, 0o600)  # until 0.3.0 all could read it
            os.ftruncate(self._file, self._end)

    @property
    def records(self) -> list[Record]:
        """Return the blocks of the file, in the order in which they were written."""
        return [record for page in self._pages.values() for record in page.values()]

    def fresh(self) -> Iterator[Record]:
        """Yield the blocks that the writer added since the last call, or since the list was opened."""
        while (found := self._next()) is not None:
            record, self._end = found
            self._note(record)
            yield record

    def is_replaced(self) -> bool:
        """Tell whether the writer began another list."""
        with contextlib.suppress(OSError):
            return os.stat(self._path).st_ino != os.fstat(self._file).st_ino
        return True

    def reopen(self) -> None:
        """Read the list anew: one that the writer began, or that this process writes from now on."""
        os.close(self._file)
        self._file, self._pages, self._live_bytes = -1, {}, 0
        self._open()

    def take_over(self) -> bool:
        """Become the writer if the one before has ended; return whether that was so. Then `reopen` reads the whole
        list."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = self._path.with_suffix(".lock")
            self.writes = os.stat(there).st_ino == os.fstat(self._lock).st_ino  # else a process of others removed it
        return self.writes

    def let_go(self) -> None:
        """Stop being the writer, so that another process can become it."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self.writes = False

    def add(self, record: Record) -> None:
        """Add a block, over those that lay there.

        Raises:
            OSError: the disk fails, or has no room; the list ends before the block then.
        """
        packed = _packed(record)
        if os.pwrite(self._file, packed, self._end) < len(packed):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for the list {self._path}")
        self._end += len(packed)
        self._note(record)
        if self._end > SPARE + 2 * self._live_bytes:
            self._replace(self.records)

    def forget(self, place: int) -> None:
        """Leave out a block whose bytes are being overwritten, from the next list on."""
        self._drop(self._pages.get(place // self._page_bytes, {}).pop(place, None))

    def clear(self) -> None:
        """Begin anew with no block."""
        self._pages, self._live_bytes = {}, 0
        if self.writes:
            self._replace(())

    def close(self) -> None:
        """Release the list to the next writer."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def _note(self, record: Record) -> None:
        place, page = record.block.place, record.block.place // self._page_bytes
        if place % self._page_bytes == 0:  # the page was taken anew
            for other in self._pages.pop(page, {}).values():
                self._drop(other)
        blocks = self._pages.setdefault(page, {})
        self._drop(blocks.pop(place, None))
        blocks[place] = record
        self._live_bytes += _size(record)

    def _drop(self, record: Record | None) -> None:
        if record is not None:
            self._live_bytes -= _size(record)

    def _next(self) -> tuple[Record, int] | None:
        head = os.pread(self._file, _RECORD.size, self._end)
        if len(head) < _RECORD.size:
            return None
        group, place, num_bytes, digest, checksum, length, level, tenant, ends = _RECORD.unpack(head)
        rest = os.pread(self._file, length + _SUM, self._end + _RECORD.size)
        tokens, total = rest[:length], rest[length:]
        if total != _sum(head + tokens):
            return None
        tenant = b"" if tenant == _NO_TENANT else tenant
        block = StoredBlock(group, digest, tokens, place, num_bytes, tenant, level, ends - _clocks_apart())
        return Record(block, checksum), self._end + _RECORD.size + len(rest)

    def _replace(self, records: Iterable[Record]) -> None:
        """Write another list in this one's place, so that readers see one or the other."""
        new = self._path.with_suffix(".new")
        content = self._header + b"".join(map(_packed, records))
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # it has the prompts' tokens
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(content)
            os.replace(new, self._path)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self._file)
        self._file = descriptor
        self._end = len(content)


def remove_others(folder: Path, identity: bytes) -> None:
    """Remove the files of other identities that no process writes, so that a folder does not grow with each model."""
    for lock in folder.glob("jpaged-*.lock"):
        if lock.stem == f"jpaged-{identity.hex()}":
            continue
        with contextlib.suppress(OSError), lock.open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for suffix in (".list", ".new", ".blocks", ".lock"):
                lock.with_suffix(suffix).unlink(missing_ok=True)


def _size(record: Record) -> int:
    return _RECORD.size + len(record.block.tokens) + _SUM


def _packed(record: Record) -> bytes:
    block = record.block
    head = _RECORD.pack(
        block.group,
        block.place,
        block.num_bytes,
        block.digest,
        record.checksum,
        len(block.tokens),
        block.level,
        block.tenant or _NO_TENANT,
        block.until + _clocks_apart(),
    )
    return head + block.tokens + _sum(head + block.tokens)


def _clocks_apart() -> float:
    """Return the seconds between the clock on which priorities end, which begins anew with the machine, and that of
    the calendar, by which lists say it."""
    return time.time() - time.monotonic()


def _sum(content: bytes) -> bytes:
    return blake2b(content, digest_size=_SUM).digest()

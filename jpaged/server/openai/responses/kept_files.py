"""Writes responses and their events to disk, so that clients can read them after a restart."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
_END = b"\n\n"
"""The end of an event. JSON on one line contains no empty line."""


def private(path: str, flags: int) -> int:
    """Open a file that only its owner may read, if it is new; for the argument `opener` of `open`."""
    return os.open(path, flags, 0o600)


class EventLog:
    """Writes the events of one response to a file, each before it is sent.

    If an event cannot be written, the file is removed, since later events would have wrong numbers; the log says so.

    Args:
        fresh: whether to overwrite a file that another response left.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, file: Path, *, fresh: bool) -> None:
        self._file = file
        self._out = io.FileIO(file, "wb" if fresh else "ab", opener=private)

    def append(self, event: bytes) -> None:
        """Write an event. When this returns, it survives the end of the process."""
        if self._out.closed:
            return
        try:
            if self._out.write(event) != len(event):
                raise OSError("the disk is full")
        except OSError as error:
            logger.error("a response's events cannot be written and are lost at a restart: %s", error)
            self.close()
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. Calling it twice is harmless."""
        with contextlib.suppress(OSError):
            self._out.close()


class KeptFiles:
    """A folder with two files for each response: its record (request, key and finished answer), and its events.

    A file's name is a hash, since a key's name and an id may have any length and any characters.

    Args:
        folder: created if missing. None: nothing is kept, and all methods do nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @property
    def used(self) -> bool:
        """Tell whether there is a folder."""
        return self._folder is not None

    def write(self, record: dict[str, Any]) -> None:
        """Write a record, replacing the one with its key and id. A failure is logged."""
        if self._folder is None:
            return
        file = self._file(record["key"], record["id"], ".json")
        new = file.with_suffix(".new")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(new, "w", encoding="utf-8", opener=private) as file_of_record:
                file_of_record.write(json.dumps(record))
            os.replace(new, file)
        except OSError as error:
            logger.error("a response cannot be written and is lost at a restart: %s", error)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)  # a full disk needs the room

    def remove(self, key: str, response_id: str) -> None:
        """Remove a record and its events. A missing file is no error; a failure is logged."""
        if self._folder is None:
            return
        for kind in (".json", ".events"):
            try:
                self._file(key, response_id, kind).unlink(missing_ok=True)
            except OSError as error:
                logger.error("the file of a deleted response cannot be removed: %s", error)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield all records, the oldest first. An invalid one is skipped and logged."""
        if self._folder is None or not self._folder.is_dir():
            return
        for file in self._folder.glob("*.events"):
            if not file.with_suffix(".json").exists():  # the server was killed while it deleted a response
                file.unlink(missing_ok=True)
        for file in sorted(self._folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
            try:
                record = json.loads(file.read_text(encoding="utf-8"))
                mine = self._file(record["key"], record["id"], ".json")
                if file != mine:  # versions before 0.3 named them by key and id
                    os.replace(file, mine)
                yield record
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                logger.error("a kept response is skipped: %s: %s", file.name, type(error).__name__)

    # ------------------------------------------------------------------ events

    def events(self, key: str, response_id: str) -> list[bytes] | None:
        """Return the events of a response that clients may have received, in order; None if some are unknown.

        An event that was not written completely is cut off: it was never sent."""
        if self._folder is None:
            return None
        file = self._file(key, response_id, ".events")
        try:
            whole, end, torn = file.read_bytes().rpartition(_END)
            if torn:
                os.truncate(file, len(whole) + len(end))
        except OSError:
            return None
        events = [event + _END for event in whole.split(_END)] if end else []
        return events if all(event.startswith(b"event: ") and b"\ndata: {" in event for event in events) else None

    def log(self, key: str, response_id: str, *, fresh: bool = False) -> EventLog | None:
        """Return a log that appends a response's events to its file; None if it cannot be opened. See `EventLog`."""
        if self._folder is None:
            return None
        try:
            return EventLog(self._file(key, response_id, ".events"), fresh=fresh)
        except OSError as error:
            logger.error("a response's events cannot be written and are lost at a restart: %s", error)
            return None

    def _file(self, key: str, response_id: str, kind: str) -> Path:
        assert self._folder is not None
        name = hashlib.sha256(json.dumps([key, response_id]).encode()).hexdigest()
        return self._folder / f"{name}{kind}"

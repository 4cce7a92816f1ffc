"""Keeps responses in files, so that their clients may ask for them after the server was killed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
_END = b"\n\n"
"""Ends an event; JSON has no line in it that is empty."""


class EventLog:
    """Writes the events of one response into a file, each before anybody is told of it.

    Where one cannot be written the file goes, as those behind it would have no place in it; the log says so.

    Args:
        fresh: whether what the file holds is of another response, and goes.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, file: Path, *, fresh: bool) -> None:
        self._file = file
        self._out = file.open("wb" if fresh else "ab", buffering=0)

    def append(self, event: bytes) -> None:
        """Write an event; it is in the system's hands when this returns, whatever kills the process then."""
        if self._out.closed:
            return
        try:
            if self._out.write(event) != len(event):
                raise OSError("there is no room for it")
        except OSError as error:
            logger.error("the events of a response will not outlive the server: %s", error)
            self.close()
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def close(self) -> None:
        """Write no more; again is no error."""
        with contextlib.suppress(OSError):
            self._out.close()


class KeptFiles:
    """A folder with two files for each response: what was asked, by which key, and the answer once it is there; and the
    events that tell of it.

    A file's name is a hash: a key's name and an id are of any length and made of anything.

    Args:
        folder: it is made; None = nothing is kept, and all of this does nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @property
    def used(self) -> bool:
        """Tell whether anything is kept."""
        return self._folder is not None

    def write(self, record: dict[str, Any]) -> None:
        """Write a record, in the place of the one with its key and id; where it cannot be, the log says so."""
        if self._folder is None:
            return
        file = self._file(record["key"], record["id"], ".json")
        new = file.with_suffix(".new")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_text(json.dumps(record), encoding="utf-8")
            os.replace(new, file)
        except OSError as error:
            logger.error("a response will not outlive the server: %s", error)

    def remove(self, key: str, response_id: str) -> None:
        """Remove a record and its events. One that is not there is no error; of one that stays the log tells."""
        if self._folder is None:
            return
        for kind in (".json", ".events"):
            try:
                self._file(key, response_id, kind).unlink(missing_ok=True)
            except OSError as error:
                logger.error("a response that is forgotten stays in its file: %s", error)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield all records, the oldest first; what is none is left out, and the log says so."""
        if self._folder is None or not self._folder.is_dir():
            return
        for file in self._folder.glob("*.events"):
            if not file.with_suffix(".json").exists():  # the server was killed while it forgot a response
                file.unlink(missing_ok=True)
        for file in sorted(self._folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
            try:
                record = json.loads(file.read_text(encoding="utf-8"))
                mine = self._file(record["key"], record["id"], ".json")
                if file != mine:  # versions before 0.3 named them by key and id
                    os.replace(file, mine)
                yield record
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                logger.error("a kept response is left out: %s: %s", file.name, type(error).__name__)

    # ------------------------------------------------------------------ events

    def events(self, key: str, response_id: str) -> list[bytes] | None:
        """Return the events of a response that clients may have been told, in their order; None where they are not all
        known. What was not written to its end is cut off: nobody was told it."""
        if self._folder is None:
            return None
        file = self._file(key, response_id, ".events")
        try:
            told, end, torn = file.read_bytes().rpartition(_END)
            if torn:
                os.truncate(file, len(told) + len(end))
        except OSError:
            return None
        events = [event + _END for event in told.split(_END)] if end else []
        return events if all(event.startswith(b"event: ") and b"\ndata: {" in event for event in events) else None

    def log(self, key: str, response_id: str, *, fresh: bool = False) -> EventLog | None:
        """Return what writes the events of a response, behind those that are there unless it is `fresh`; None where
        nothing can."""
        if self._folder is None:
            return None
        try:
            return EventLog(self._file(key, response_id, ".events"), fresh=fresh)
        except OSError as error:
            logger.error("the events of a response will not outlive the server: %s", error)
            return None

    def _file(self, key: str, response_id: str, kind: str) -> Path:
        assert self._folder is not None
        name = hashlib.sha256(json.dumps([key, response_id]).encode()).hexdigest()
        return self._folder / f"{name}{kind}"

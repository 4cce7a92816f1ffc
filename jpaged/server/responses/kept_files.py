"""Keeps responses in files, so that their clients may ask for them after the server was killed."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

logger = logging.getLogger(__name__)


class KeptFiles:
    """A folder with a file for each response: what was asked, by which key, and the answer once it is there.

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
        file = self._file(record["key"], record["id"])
        new = file.with_suffix(".new")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_text(json.dumps(record), encoding="utf-8")
            os.replace(new, file)
        except OSError as error:
            logger.error("a response will not outlive the server: %s", error)

    def remove(self, key: str, response_id: str) -> None:
        """Remove a record; one that is not there is no error."""
        if self._folder is not None:
            self._file(key, response_id).unlink(missing_ok=True)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield all records, the oldest first; what cannot be read is left out, and the log says so."""
        if self._folder is None or not self._folder.is_dir():
            return
        for file in sorted(self._folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
            try:
                yield json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                logger.error("a kept response is left out: %s: %s", file.name, type(error).__name__)

    def _file(self, key: str, response_id: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{quote(key, safe='')}@{quote(response_id, safe='')}.json"

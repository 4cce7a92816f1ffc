"""The log of a server: one JSON object a line, on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

LEVELS = ("debug", "info", "warning", "error")
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request that the running task works for; None = none is known, as in the engine's thread."""
_JSON = ("jpaged.access", "jpaged.prompts")
"""Loggers whose messages are JSON."""


class JsonLines(logging.Formatter):
    """Writes a record as JSON; what is JSON already, as the lines of the access log, stays.

    A line has the id of the request that it was written for, where one is known.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.name in _JSON:
            return text
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": text,
        }
        if (request_id := getattr(record, "request_id", None) or REQUEST_ID.get()) is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logs(level: str, *, prompts: bool = False) -> None:
    """Let the process write its log as JSON lines.

    Args:
        level: least level of the lines of jpaged and uvicorn.
        prompts: whether the lines of prompts and outputs are written at any level.

    Raises:
        ValueError: the level is none of `LEVELS`.
    """
    if level not in LEVELS:
        raise ValueError(f"log_level={level!r} is not one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("jpaged", "uvicorn.error"):
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("jpaged.prompts").setLevel(logging.INFO if prompts else logging.NOTSET)

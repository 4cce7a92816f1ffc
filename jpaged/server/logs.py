"""The log of a server: one JSON object a line, on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")


class JsonLines(logging.Formatter):
    """Writes a record as JSON; what is JSON already, as the lines of the access log, stays."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.name == "jpaged.access":
            return text
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": text,
        }
        if (request_id := getattr(record, "request_id", None)) is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logs(level: str) -> None:
    """Let the process write its log as JSON lines.

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

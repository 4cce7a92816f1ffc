"""The server's log on standard error, JSON lines or text, and the optional log of prompts (``--log-prompts``)."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged import RequestOutput
    from jpaged.server.caller import Caller

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that the current task serves; None if unknown, as in the engine's thread."""
_JSON = ("jpaged.access", "jpaged.prompts")
"""Loggers whose messages are JSON already."""


class JsonLines(logging.Formatter):
    """Formats a record as JSON, with the id of its request if it is known. Messages of `_JSON` stay as they are."""

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


class PlainLines(logging.Formatter):
    """Formats a record as a line for a person; the fields of a message of `_JSON` become ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.name in _JSON:
            fields = json.loads(text)
            shown = {name: value for name, value in fields.items() if value is not None and name != "time"}
            text = " ".join(f"{name}={_in_line(value)}" for name, value in shown.items())
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {text}"
        if record.levelno >= logging.WARNING:
            line = f"{line[:9]}{record.levelname.lower()}: {line[9:]}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _in_line(value: Any) -> str:
    """Return a value for a line; one that could begin another line or steer the terminal is written as JSON."""
    text = str(value)
    return text if text.isprintable() else json.dumps(value)


def configure_logs(level: str, *, prompts: bool = False, log_format: str | None = None) -> None:
    """Configure the process's log on standard error.

    Args:
        level: lowest level of the lines of jpaged and uvicorn.
        prompts: whether to log prompts and outputs, at any level.
        log_format: one of `FORMATS`; None: text on a terminal, JSON elsewhere.

    Raises:
        ValueError: the level is not one of `LEVELS`, or the format not one of `FORMATS`.
    """
    if level not in LEVELS:
        raise ValueError(f"log_level={level!r} is not one of {', '.join(LEVELS)}")
    if log_format not in (None, *FORMATS):
        raise ValueError(f"log_format={log_format!r} is not one of {', '.join(FORMATS)}")
    plain = log_format == "text" or (log_format is None and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainLines() if plain else JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("jpaged", "uvicorn.error"):
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("jpaged.prompts").setLevel(logging.INFO if prompts else logging.NOTSET)


prompts = logging.getLogger("jpaged.prompts")


class PromptLog:
    """Collects one request of the engine and logs a line when it ends, in whatever way.

    Args:
        prompt: the prompt as the engine gets it.
        deltas: whether its outputs are deltas.
    """

    def __init__(self, caller: Caller, prompt: Mapping[str, Any], *, deltas: bool) -> None:
        self._caller = caller
        self._prompt = prompt
        self._deltas = deltas
        self._texts: dict[int, str] = {}
        self._reasons: dict[int, str | None] = {}

    def add(self, output: RequestOutput) -> None:
        """Add an output."""
        for one in output.outputs:
            begun = self._texts.get(one.index, "") if self._deltas else ""
            self._texts[one.index] = begun + one.text
            self._reasons[one.index] = one.finish_reason

    def write(self) -> None:
        """Log the line. It counts images and videos without their content; an output that was cut off has no
        `finish_reason`."""
        key, media = self._caller.key, self._prompt.get("multi_modal_data") or {}
        name = "prompt" if self._prompt.get("prompt") is not None else "prompt_token_ids"
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": self._caller.request_id,
            "key": None if key is None else key.name,
            name: self._prompt[name],
            **{f"{modality}s": len(items) for modality, items in media.items()},
            "outputs": [
                {"index": index, "text": text, "finish_reason": self._reasons[index]}
                for index, text in sorted(self._texts.items())
            ],
        }
        prompts.info("%s", json.dumps(line))

"""Says on standard error what a command waits for, from before libraries are imported until the engine is ready."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 10.0
"""Seconds of silence after which a command says again what it does."""
PROGRESS = logging.getLogger("jpaged.progress")
"""Where rooms log what takes long, as it begins. A server's log shows it among its other lines."""


class _Waiting(logging.Handler):
    """Knows what is done, and since when.

    Args:
        prints: whether to write it to standard error; else a log does.
    """

    def __init__(self, prints: bool) -> None:
        super().__init__(logging.INFO)
        self.doing = ""
        self._prints = prints
        self._began = self.said = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Note that something else begins."""
        self.said = time.monotonic()
        text = record.getMessage()
        if not text.startswith("still "):
            self.doing, self._began = text, self.said
        if self._prints and sys.stderr is not None:
            print(f"{text[:1].upper()}{text[1:]} ...", file=sys.stderr, flush=True)

    def repeat(self) -> None:
        """Say what is still done, if nothing was said for `INTERVAL` seconds."""
        if time.monotonic() - self.said >= INTERVAL:
            PROGRESS.info("still %s, %.0f s so far", self.doing, time.monotonic() - self._began)


@contextmanager
def waiting(doing: str, *, logs: bool = False) -> Iterator[None]:
    """Say at once what a command does, then each next thing as it begins, and every `INTERVAL` seconds that it goes on.

    Args:
        doing: such as "loading smollm2-135m".
        logs: whether the process has a log, which then shows all this; else lines on standard error do.
    """
    handler, ended = _Waiting(prints=not logs), threading.Event()

    def repeat() -> None:
        while not ended.wait(1.0):
            handler.repeat()

    level, propagate = PROGRESS.level, PROGRESS.propagate
    PROGRESS.addHandler(handler)
    if not logs:
        PROGRESS.setLevel(logging.INFO)
        PROGRESS.propagate = False  # once is enough where the user's environment has a log too
    ticking = threading.Thread(target=repeat, name="jpaged-waiting", daemon=True)
    try:
        PROGRESS.info("%s", doing)
        ticking.start()
        yield
    finally:
        ended.set()
        if ticking.ident is not None:
            ticking.join()
        PROGRESS.removeHandler(handler)
        PROGRESS.setLevel(level)
        PROGRESS.propagate = propagate

"""Says what a run of the tests waits for, where nothing was reported for a while: imports, and first compilations."""

from __future__ import annotations

import threading
import time

import pytest

SECONDS = 20.0


class Silence:
    """A plugin of the process that reports.

    Args:
        reporter: pytest's terminal reporter.
        seconds: of silence, after which it says what is being done.
    """

    def __init__(self, reporter: pytest.TerminalReporter, seconds: float = SECONDS) -> None:
        self._reporter = reporter
        self._seconds = seconds
        self._doing = "starting"
        self._began = self._said = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="silence", daemon=True)

    def pytest_sessionstart(self) -> None:
        self._thread.start()

    def pytest_collection(self) -> None:
        self._begin("collecting tests, which imports jax, torch and transformers")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begin(f"in {nodeid} (a first run compiles the processor's loops, which takes minutes)")

    def pytest_runtest_logreport(self) -> None:
        self._said = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        self._ended.set()
        self._thread.join()

    def _begin(self, doing: str) -> None:
        self._doing, self._began = doing, time.monotonic()

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds)):
            now = time.monotonic()
            if now - max(self._said, self._began) >= self._seconds:
                self._said = now
                self._reporter.ensure_newline()
                self._reporter.write_line(f"still {self._doing}, {now - self._began:.0f} s so far")

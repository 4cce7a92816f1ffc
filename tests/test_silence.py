"""A run of the tests that reports nothing for a while says what it waits for."""

from __future__ import annotations

import threading

from silence import Silence


class Reporter:
    """Notes the lines that are written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.written = threading.Event()

    def ensure_newline(self) -> None:
        pass

    def write_line(self, line: str) -> None:
        self.lines.append(line)
        self.written.set()


def test_it_says_which_test_runs_and_ends_with_the_session():
    reporter = Reporter()
    silence = Silence(reporter, seconds=0.01)
    silence.pytest_collection()
    silence.pytest_sessionstart()
    assert reporter.written.wait(60) and reporter.lines[0].startswith("still collecting tests, ")
    reporter.written.clear()
    silence.pytest_runtest_logstart("tests/a.py::test_b")
    while not any(line.startswith("still in tests/a.py::test_b ") for line in reporter.lines):
        assert reporter.written.wait(60)
        reporter.written.clear()
    silence.pytest_sessionfinish()
    number = len(reporter.lines)
    silence.pytest_runtest_logstart("tests/a.py::test_c")
    assert len(reporter.lines) == number

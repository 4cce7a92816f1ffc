"""Says of a worker that is lost how it ended, where it was, and what it held.

xdist says that it was "not properly terminated". Libraries take over the signals for which Python prints a traceback,
and what a process prints as it ends is lost with what pytest captures.
"""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from process_memory import num_mappings, resident_bytes

LONGEST = 6000
"""Characters of a worker's last words; the thread that failed is among the first."""


class LastWords:
    """A plugin of a worker, which keeps a file: where the worker is, and its threads if it ends by a fault."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "w")  # noqa: SIM115  (open as long as the process is)
        self._at = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        at = nodeid.partition("::")[0]
        if at == self._at:
            return
        self._at = at
        self._file.seek(0)
        self._file.truncate()
        held = f"{resident_bytes() / 1e9:.1f} GB and {num_mappings():,} mappings"
        print(f"it had {held} as {at} began", file=self._file, flush=True)
        faulthandler.disable()  # enabled again it takes the signals back from who has taken them
        faulthandler.enable(self._file)


class LostWorkers:
    """A plugin of the process that workers report to.

    Args:
        config: pytest's, whose terminal reporter is not there yet where plugins are configured.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory()
        self._words: dict[str, str] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["last_words"] = str(self._path(node))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if not error or error == "keyboard-interrupt":
            return
        path = self._path(node)
        said = path.read_text(errors="replace")[:LONGEST] if path.exists() else "it had not begun"
        self._words[node.gateway.id] = words = f"{node.gateway.id} {how_it_ended(node)}; {said}"
        if reporter := self._config.pluginmanager.getplugin("terminalreporter"):
            reporter.write_line(words)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        words = self._words.get(report.node.gateway.id, "")  # type: ignore[attr-defined]  (xdist's)
        report.longrepr = f"{report.longrepr}\n{words}"

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()

    def _path(self, node: Any) -> Path:
        return Path(self._folder.name) / node.gateway.id


def how_it_ended(node: Any) -> str:
    """Return how a worker's process has ended."""
    try:
        status = node.gateway._io.popen.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return "goes on, but its pipe is closed"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"

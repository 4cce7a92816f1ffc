"""A worker that is lost leaves words: how it ended, and where it was."""

import os
import subprocess
import sys
from pathlib import Path

TAKES = """
import signal

def test_takes_the_signal_as_a_library_does():
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
"""
ABORTS = """
import os

def test_aborts():
    os.abort()
"""
CONFTEST = """
from lost_workers import LastWords, LostWorkers

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        plugin = LastWords(config.workerinput["last_words"])
    else:
        plugin = LostWorkers(config)
    config.pluginmanager.register(plugin)
"""


def test_a_run_says_of_a_lost_worker_how_it_ended_what_it_held_and_where_it_was(tmp_path):
    (tmp_path / "test_a.py").write_text(TAKES)
    (tmp_path / "test_b.py").write_text(ABORTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "-p", "no:schemathesis", tmp_path]
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    failure = done.stdout.split("= FAILURES =")[1]
    assert "worker 'gw0' crashed while running 'test_b.py::test_aborts'" in failure
    assert "gw0 was ended by SIGABRT; it had 0." in failure and " mappings as test_b.py began" in failure
    assert "Fatal Python error: Aborted" in failure and 'test_b.py", line 5 in test_aborts' in failure

"""A test that printed what no UTF-8 holds is told like any other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from reports import encodable

LOGGED = 'import logging\n\ndef test_fails():\n    logging.warning("half \\ud800 of a pair")\n    assert 1 > 2\n'


def test_half_a_surrogate_pair_is_written_out_and_the_rest_is_as_it_was():
    report = pytest.TestReport("a", ("a", 1, "a"), {}, "failed", None, "call", [("log", "x\ud800"), ("out", "ä")])
    assert encodable(report).sections == [("log", "x\\ud800"), ("out", "ä")]


def test_a_run_with_workers_goes_on_after_a_test_that_logged_one(tmp_path):
    """Without `encodable` xdist ends it with an internal error."""
    (tmp_path / "test_half.py").write_text(LOGGED + "\n\ndef test_passes():\n    pass\n")
    hook = "import pytest\nfrom reports import encodable\n\n@pytest.hookimpl(wrapper=True)\n"
    (tmp_path / "conftest.py").write_text(
        hook + "def pytest_runtest_makereport():\n    report = yield\n    return encodable(report)\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", tmp_path]
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout

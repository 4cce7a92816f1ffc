"""What a start used is counted by phase, and steps in a steady state touch no new memory."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint

from scripts.benchmarks.start_phases import SOFTWARE_PAGE_FAULTS, Counter, Phases

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts Linux' page faults")
ROOT = Path(__file__).parents[2]
SIZE = 1 << 20


def test_a_phase_has_what_was_used_since_the_one_before():
    phases, logger = Phases(), logging.getLogger("test_start_phases")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(phases)
    kept = [np.ones(SIZE, np.uint8) for _ in range(40)]
    logger.debug("memory is %s", "taken")
    phases.end("nothing")
    first, second = phases.rows
    assert (first["phase"], second["phase"]) == ("memory is taken", "nothing") and len(kept) == 40
    assert first["faults"] > 0 and second["faults"] < first["faults"]
    assert second["user seconds"] >= 0 and second["kernel seconds"] >= 0


def test_a_counter_counts_or_says_that_it_cannot():
    faults = Counter(*SOFTWARE_PAGE_FAULTS)
    if not faults.works:
        pytest.skip("this system lets no process count its events")
    before = faults.read()
    kept = [np.ones(SIZE, np.uint8) for _ in range(40)]
    if faults.read() == before == 0:
        pytest.skip("this system counts no events of a process that it lets ask")
    assert faults.read() > before and kept
    nothing = Counter(99, 0)
    assert not nothing.works and nothing.read() == 0


@pytest.mark.nightly
def test_a_batch_that_has_run_before_faults_no_more(tmp_path):
    model = tmp_path / "model"
    make_checkpoint("llama", model)
    command = [sys.executable, "-m", "scripts.benchmarks.start_phases", model, "8", "4", "small"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = {row["phase"]: row["faults"] for row in json.loads(done.stdout.splitlines()[-1])}
    assert list(found)[:4] == ["interpreter", "import jpaged", "config and tokenizer are read", "weights are in place"]
    assert found["4 x 8 tokens, again"] < 8 * 16, "a few of Python's pages, none a step"

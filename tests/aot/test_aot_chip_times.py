"""A first run on a TPU times the launch that is simulated, and nothing else."""

import json

import pytest
from environments import run_program

from scripts.compiled_code.chip_times import LAUNCHES

pytestmark = [pytest.mark.aot, pytest.mark.nightly]


@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
def test_a_turn_runs_one_kernel_and_at_most_a_copy_of_its_result(target):
    turns = dict(map(json.loads, run_program("tpu", "chip_times_program.py", target).splitlines()))
    assert set(turns) == set(LAUNCHES)
    for name, opcodes in turns.items():
        assert sorted(set(opcodes) - {"copy", "add"}) == ["custom-call"], name  # the loop's counter is added to
        assert opcodes.count("custom-call") == 1 and opcodes.count("copy") <= 1, name

"""The TPU kernels compile for real and update the pool in place (DESIGN: one pool, many views)."""

import json

import pytest
from environments import run_program

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module")
def programs():
    lines = run_program("tpu", "kernels_program.py").splitlines()
    return {line["name"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize("name", ["decode", "mixed", "mixed, window", "mixed, chunks", "block_copy"])
def test_the_pool_is_updated_in_place_on_tpu(programs, name):
    sizes = programs[name]
    assert sizes["alias"] >= sizes["pool"]
    assert sizes["temp"] < 0.05 * sizes["pool"]

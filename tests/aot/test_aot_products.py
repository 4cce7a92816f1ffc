"""Products with quantised matrices compile for a TPU without a float copy of the matrix, and sum over devices once."""

import json

import pytest
from environments import run_program

pytestmark = [pytest.mark.aot, pytest.mark.nightly]

MOST_CYCLES = {("uint4", 64): 340_000, ("uint4", 512): 1_050_000, ("int8", 64): 70_000, ("int8", 512): 310_000}
"""Estimated by the compiler for one v5e, by form and rows."""


@pytest.fixture(scope="module")
def products():
    lines = run_program("tpu", "products_program.py").splitlines()
    return {(line["name"], line["rows"], line["devices"]): line for line in map(json.loads, lines)}


@pytest.mark.parametrize(("name", "rows"), MOST_CYCLES)
def test_a_product_takes_a_fraction_of_dequantising(products, name, rows):
    taken = products[name, rows, 1]
    assert taken["cycles"] <= MOST_CYCLES[name, rows] < products["packed", rows, 1]["cycles"]
    assert taken["temp"] < 1 << 20 < products["packed", rows, 1]["temp"]


@pytest.mark.parametrize(("name", "rows"), MOST_CYCLES)
def test_devices_that_split_the_inputs_sum_up_once(products, name, rows):
    taken = products[name, rows, 8]
    assert taken["collectives"] == ["all-reduce"]
    assert taken["temp"] < 16 << 20

"""Steps that few ask for update the pool in place too: layers that keep part of a prompt, and whole experts."""

import json

import pytest
from environments import run_program

pytestmark = pytest.mark.aot

TARGETS = {"TPU v5e x8": ("tpu", "8", "tpu"), "H200 x1": ("cuda", "1", "gpu")}
"""Compiler, devices, and kernels."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(target, id=name, marks=pytest.mark.nightly if name == "H200 x1" else ())
        for name, target in TARGETS.items()
    ],
)
def programs(request):
    lines = run_program(request.param[0], "variants_program.py", *request.param).splitlines()
    return {"devices": int(request.param[1])} | {line["name"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize("name", ["kv_budget", "whole experts", "adapters"])
def test_a_step_copies_no_pool(programs, name):
    """With a budget the step ends prompts: what each layer keeps of them moves within the pool."""
    sizes = programs[name]
    assert sizes["alias"] >= sizes["pool"]
    assert sizes["temp"] < 0.02 * sizes["pool"]


@pytest.mark.parametrize(("name", "layers"), [("kv_budget", 1), ("whole experts", 2)])
def test_a_layer_has_two_all_reduces_and_the_embedding_one(programs, name, layers):
    """Choosing what is kept needs none, nor does a token's way to its experts. The bands are one loop."""
    crossings = 2 * layers + 1 if programs["devices"] > 1 else 0
    assert programs[name]["collectives"] == ["all-reduce"] * crossings


def test_adapters_cross_devices_as_sums_only(programs):
    """What is gathered of the pool stays on its shard; a matrix that is split by inputs adds up rank-wide products."""
    assert set(programs["adapters"]["collectives"]) <= {"all-reduce"}

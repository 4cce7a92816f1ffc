"""The whole step of a Llama-3-8B updates the pool in place (DESIGN: one pool, many views)."""

import json

import pytest
from environments import run_program

pytestmark = pytest.mark.aot

TARGETS = {
    "TPU v5e x8": ("tpu", "8", "tpu", "32"),
    "H200 x1": ("cuda", "1", "gpu", "6"),
    "H200 x8": ("cuda", "8", "gpu", "6"),
    "H200 x1, all layers": ("cuda", "1", "gpu", "32"),
    "H200 x8, all layers": ("cuda", "8", "gpu", "32"),
    "H200 x8 without Triton": ("cuda", "8", "xla", "32"),
}
"""Compiler, devices, kernels, and layers: with Triton's kernels these follow one another, and each is compiled."""

NIGHTLY = ("H200 x8", "H200 x1", "H200 x1, all layers", "H200 x8, all layers")
"""By day a GPU's step is compiled as it is by default, without Triton."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(target, id=name, marks=pytest.mark.nightly if name in NIGHTLY else ())
        for name, target in TARGETS.items()
    ],
)
def programs(request):
    target, devices, kernels, layers = request.param
    lines = run_program(target, "step_program.py", *request.param).splitlines()
    given = {"devices": int(devices), "kernels": kernels, "layers": int(layers)}
    return given | {line["name"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_a_step_needs_little_memory_beside_the_pool(programs, name):
    sizes = programs[name]
    assert sizes["alias"] >= sizes["pool"]
    assert sizes["temp"] < 0.05 * sizes["pool"]


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_a_layer_has_two_all_reduces_and_the_embedding_one(programs, name):
    """Where layers are a loop, its body stands in the program once; with Triton's kernels they follow one another."""
    layers = programs["layers"] if programs["kernels"] == "gpu" else 1
    assert programs[name]["collectives"] == ["all-reduce"] * ((2 * layers + 1) if programs["devices"] > 1 else 0)


LAYER_ON_TPU = {"decode": (12, 171_500, 0, 0.94), "mixed": (14, 330_000, 0, 0.87)}
"""Bounds of a layer in a step: most operations, cycles and gathers, and the least share of products in its cycles."""


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_a_layer_on_a_tpu_repeats_nothing_that_needs_the_batch_only(programs, name):
    """Every operation takes a TPU about 1,800 cycles, whatever it does."""
    if programs["kernels"] != "tpu":
        pytest.skip("the estimates are those of the TPU's compiler")
    layer, (operations, cycles, gathers, products) = programs[name]["layer"], LAYER_ON_TPU[name]
    assert layer["sorts"] == 0
    assert layer["the same for all layers"] == 0
    assert layer["gathers"] <= gathers
    assert layer["operations"] <= operations
    assert layer["cycles"] <= cycles
    assert layer["products"] >= products * layer["cycles"]


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_no_matrix_of_a_layer_is_copied(programs, name):
    """XLA:GPU copies layers out of a stack, which costs a decode step twice the time of reading the weights."""
    largest = 2 * 4096 * 2 * 14336 // programs["devices"]
    assert programs[name]["temp"] < largest or programs["kernels"] == "xla"


def test_copying_blocks_needs_little_beside_the_pool(programs):
    sizes = programs["block copy"]
    assert sizes["alias"] >= sizes["pool"]
    assert sizes["temp"] < 0.05 * sizes["pool"]


def test_logits_and_draw_need_less_than_the_steps_themselves_may(programs):
    assert programs["sampler"]["temp"] < 0.05 * programs["sampler"]["pool"]


@pytest.mark.parametrize(("name", "alias"), [("swap in", 1), ("swap out", 0)])
def test_swapping_needs_nothing_beside_the_pool_and_the_blocks(programs, name, alias):
    sizes = programs[name]
    assert sizes["alias"] == alias * sizes["pool"]
    assert sizes["temp"] < 1 << 20

"""Steps whose tokens read images update the pool in place, and so does the encoder."""

import json

import pytest
from environments import run_program

pytestmark = [pytest.mark.aot, pytest.mark.nightly]

TARGETS = {
    "TPU v5e x8": ("tpu", "8", "tpu", "mllama"),
    "H200 x1": ("cuda", "1", "gpu", "mllama"),
    "Gemma 3, TPU v5e x8": ("tpu", "8", "tpu", "gemma3"),
    "Gemma 3, H200 x1": ("cuda", "1", "gpu", "gemma3"),
}
"""Compiler, devices, kernels, and family."""


@pytest.fixture(scope="module", params=TARGETS.values(), ids=TARGETS.keys())
def programs(request):
    lines = run_program(request.param[0], "images_program.py", *request.param).splitlines()
    return {"devices": int(request.param[1])} | {line["name"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize("name", ["decode", "prompts"])
def test_a_step_copies_no_pool(programs, name):
    sizes = programs[name]
    assert sizes["alias"] >= sizes["pool"]
    assert sizes["temp"] < 0.05 * sizes["pool"]


def test_encoding_an_image_copies_no_pool(programs):
    """Its keys and values are written in place; what else it needs are its own 6,432 tokens' vectors and scores."""
    sizes = programs["encoder"]
    assert sizes["alias"] >= sizes["pool"]
    assert sizes["temp"] < 0.5 * sizes["pool"]


def test_layers_that_read_images_add_no_collective_of_another_kind(programs):
    """Two all-reduces a layer, the three of full attention and the one that reads images, and one for the embedding."""
    for name in ("decode", "prompts"):
        assert set(programs[name]["collectives"]) <= {"all-reduce"}

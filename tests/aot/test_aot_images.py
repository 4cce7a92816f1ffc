"""Steps whose tokens read images update the pool in place, and so does the encoder."""

import json

import pytest
from environments import run_program
from images_program import PUBLISHED

pytestmark = [pytest.mark.aot, pytest.mark.nightly]

TARGETS = {
    "TPU v5e x8": ("v5e:2x4", "8", "tpu", "mllama"),
    "H200 x1": ("h200", "1", "gpu", "mllama"),
    "Gemma 3, TPU v5e x8": ("v5e:2x4", "8", "tpu", "gemma3"),
    "Gemma 3, TPU v6e x4": ("v6e:2x2", "4", "tpu", "gemma3"),
    "Gemma 3, H200 x1": ("h200", "1", "gpu", "gemma3"),
    "LLaVA-OneVision, TPU v5e x8": ("v5e:2x4", "8", "tpu", "llava"),
    "Qwen3-VL, TPU v6e x4": ("v6e:2x2", "4", "tpu", "qwen3_vl"),
    "Qwen3-VL, H200 x1": ("h200", "1", "gpu", "qwen3_vl"),
}
"""Devices, how many, kernels, and family. For LLaVA's encoder of 64 tiles XLA:GPU finds no tile sizes unless it
can try them on a GPU."""


@pytest.fixture(scope="module", params=TARGETS.values(), ids=TARGETS.keys())
def programs(request):
    lines = run_program(
        "cuda" if request.param[0] == "h200" else "tpu", "images_program.py", *request.param
    ).splitlines()
    shape = {"devices": int(request.param[1]), "family": request.param[3]}
    return shape | {line["name"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize("name", ["decode", "prompts"])
def test_a_step_copies_no_pool(programs, name):
    sizes = programs[name]
    assert sizes["alias"] >= sizes["pool"]
    assert sizes["temp"] < 0.05 * sizes["pool"]


@pytest.mark.parametrize("name", ["encoder", "part of the encoder"])
def test_encoding_an_image_copies_no_pool(programs, name):
    """What it makes is written in place; what else it needs are its own tokens' vectors and scores, 6,432 for each of
    four images of Llama 3.2 Vision, 4,096 for each of two of Gemma 3, 4,096 of the
    largest of Qwen3-VL that a prompt holds, and 729 for each of the 64 tiles that the largest
    picture of LLaVA-OneVision has with its padding."""
    if name not in programs and programs["family"] == "mllama":
        pytest.skip("Llama 3.2 Vision encodes an image as a whole")
    sizes, images = programs[name], {"mllama": 4, "gemma3": 2, "llava": 4, "qwen3_vl": 1}[programs["family"]]
    assert sizes["alias"] >= sizes["pool"]
    assert sizes["temp"] < 0.5 * images * sizes["pool"]


def test_layers_that_read_images_add_no_collective_of_another_kind(programs):
    """Two all-reduces a layer and one for the embedding; images' features are gathered once, before the layers."""
    assert set(programs["decode"]["collectives"]) <= {"all-reduce"}
    others = [kind for kind in programs["prompts"]["collectives"] if kind != "all-reduce"]
    takes = programs["family"] != "mllama" and programs["devices"] > 1
    assert others == (["all-gather"] if takes else [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_tower_fits_and_copies_no_pool(name):
    """A v6e has 32 GB, of which the pool here is 8 GiB: with a second one there would be no room for weights. What a
    part hands on is written in place too."""
    lines = run_program("tpu", "images_program.py", "v6e:2x2", "4", "tpu", name, timeout=3600).splitlines()
    programs = {line["name"]: line for line in map(json.loads, lines)}
    assert programs.keys() == {"encoder", "part of the encoder"}
    assert programs["part of the encoder"]["alias"] > programs["encoder"]["alias"] >= programs["encoder"]["pool"]
    for sizes in programs.values():
        assert sizes["temp"] < 0.25 * sizes["pool"]

"""Heads that draft update the pool in place too, and follow a step with little more than their keys and values."""

import json

import pytest
from environments import run_program

pytestmark = [pytest.mark.aot, pytest.mark.nightly]

TARGETS = {"TPU v5e x8": ("tpu", "8", "tpu"), "H200 x1": ("cuda", "1", "gpu")}
"""Compiler, devices, and kernels."""


@pytest.fixture(scope="module", params=[pytest.param(target, id=name) for name, target in TARGETS.items()])
def programs(request):
    lines = run_program(request.param[0], "heads_program.py", *request.param).splitlines()
    return {"devices": int(request.param[1])} | {line["name"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize("name", ["step", "draft", "follow decode", "follow mixed"])
@pytest.mark.parametrize("head", ["deepseek", "eagle3", "assistant", "dflash"])
def test_a_program_copies_no_pool(programs, head, name):
    sizes = programs[f"{head} {name}"]
    assert sizes["alias"] >= sizes["pool"]
    assert sizes["temp"] < 0.03 * sizes["pool"]


@pytest.mark.parametrize("head", ["deepseek", "eagle3", "assistant", "dflash"])
def test_what_follows_a_step_launches_no_attention(programs, head):
    """Whose result is read by no later step, as the MLP's."""
    assert programs[f"{head} follow decode"]["kernel calls"] < programs[f"{head} draft"]["kernel calls"]


@pytest.mark.parametrize("name", ["follow decode", "follow mixed"])
@pytest.mark.parametrize("head", ["deepseek", "eagle3", "assistant", "dflash"])
def test_what_follows_crosses_devices_for_the_embedding_and_for_what_was_kept(programs, head, name):
    """An assistant and a drafter of blocks embed nothing: they only read the model's states, which each device has."""
    crosses = programs["devices"] > 1 and head not in ("assistant", "dflash")
    crossings = ["all-reduce", "all-gather"] if crosses else []
    assert programs[f"{head} {name}"]["collectives"] == crossings

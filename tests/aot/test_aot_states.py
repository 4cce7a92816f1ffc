"""Steps of layers that are not plain attention update the pool in place, by kernels of their own."""

import json

import pytest
from environments import run_program

pytestmark = pytest.mark.aot

TARGETS = {"TPU v5e x8": ("tpu", "8", "tpu"), "H200 x1": ("cuda", "1", "gpu")}
"""Compiler, devices, and kernels."""

OFTEN = {
    "TPU v5e x8": ("bamba:mixed", "deepseek-v2-lite:decode"),
    "H200 x1": ("qwen3-next:decode", "deepseek-v2-lite:mixed"),
}
"""What each change is tested with; the others come at night."""

ATTENTION = {"TPU v5e x8": {"decode": 2, "mixed": 3}, "H200 x1": {"decode": 3, "mixed": 4}}
"""Launches of own kernels for a layer of attention, the write of its KV among them; on TPUs prompts have their own."""

LAYERS = {
    "TPU v5e x8": {"jamba": (2, 1, 0), "bamba": (2, 1, 0), "qwen3-next": (1, 1, 0), "deepseek-v2-lite": (0, 0, 2)},
    "H200 x1": {"jamba": (2, 1, 0), "bamba": (2, 1, 0), "qwen3-next": (3, 1, 0), "deepseek-v2-lite": (0, 0, 2)},
}
"""Layers in a program with states, each a convolution and a recurrence, with attention to keys and values, and to
latents. TPUs scan over neighbouring layers that are alike, which stand in the program once."""

EXPERTS = {"TPU v5e x8": {}, "H200 x1": {"jamba": 2, "qwen3-next": 8, "deepseek-v2-lite": 2}}
"""Products of experts by own kernels: two a layer that has them."""

GEMMA_4 = {"TPU v5e x8": {"decode": 6, "mixed": 10}, "H200 x1": {"decode": 6, "mixed": 8}}
"""Calls of a local and a global layer that keep KV, and of one of each that reads it and writes none. On a GPU XLA
attends in the global ones, whose heads are of 512."""

STEPS = [f"{kind}:{step}" for kind in (*LAYERS["H200 x1"], "gemma-4") for step in ("decode", "mixed")]


def cases():
    """Yield each target with what is compiled for it together: what comes often, and the rest."""
    for target, often in OFTEN.items():
        yield pytest.param(target, often, id=target)
        rest = tuple(step for step in STEPS if step not in often)
        yield pytest.param(target, rest, id=f"{target}, the rest", marks=pytest.mark.nightly)


@pytest.mark.parametrize(("target", "steps"), list(cases()))
def test_a_step_copies_no_pool_and_runs_its_own_kernels(target, steps):
    lines = run_program(TARGETS[target][0], "states_program.py", *TARGETS[target], *steps, timeout=1500).splitlines()
    programs = {line["name"]: line for line in map(json.loads, lines)}
    assert set(programs) == set(steps)
    for name, sizes in programs.items():
        assert sizes["alias"] >= sizes["pool"], name
        assert sizes["temp"] < 0.04 * sizes["pool"], name
        kind, step = name.split(":")
        if kind == "gemma-4":
            assert sizes["kernel calls"] == GEMMA_4[target][step], name
            continue
        states, attention, latents = LAYERS[target][kind]
        of_attention = ATTENTION[target][step]
        # On a GPU XLA writes latents, in place too.
        of_latents = of_attention - (target == "H200 x1")
        calls = 2 * states + of_attention * attention + of_latents * latents + EXPERTS[target].get(kind, 0)
        assert sizes["kernel calls"] == calls, name

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

KERNELS = {
    "TPU v5e x8": dict.fromkeys(("jamba", "bamba", "qwen3-next"), {"recurrent_decode", "paged_attention"})
    | {"deepseek-v2-lite": {"paged_attention"}},
    "H200 x1": {
        "jamba": {"conv_decodes", "scan_decodes", "attend_to_units"},
        "bamba": {"conv_decodes", "scan_decodes", "attend_to_units"},
        "qwen3-next": {"conv_decodes", "delta_decodes", "attend_to_units"},
        "deepseek-v2-lite": {"attend_to_latents"},
    },
}
"""Kernels that the steps of each model call."""

STEPS = [f"{kind}:{step}" for kind in KERNELS["H200 x1"] for step in ("decode", "mixed")]


def cases():
    """Yield each target with what is compiled for it together: what comes often, and the rest."""
    for target, often in OFTEN.items():
        yield pytest.param(target, often, id=target)
        rest = tuple(step for step in STEPS if step not in often)
        yield pytest.param(target, rest, id=f"{target}, the rest", marks=pytest.mark.nightly)


@pytest.mark.parametrize(("target", "steps"), cases())
def test_a_step_copies_no_pool_and_runs_its_own_kernels(target, steps):
    lines = run_program(TARGETS[target][0], "states_program.py", *TARGETS[target], *steps, timeout=1500).splitlines()
    programs = {line["name"]: line for line in map(json.loads, lines)}
    assert set(programs) == set(steps)
    for name, sizes in programs.items():
        assert sizes["alias"] >= sizes["pool"], name
        assert sizes["temp"] < 0.02 * sizes["pool"], name
        assert KERNELS[target][name.partition(":")[0]] <= set(sizes["own kernels"]), name

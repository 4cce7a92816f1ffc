"""Steps of layers that are not plain attention update the pool in place, by kernels of their own."""

import json

import pytest
from environments import run_program

pytestmark = pytest.mark.aot

TARGETS = {"TPU v5e x8": ("tpu", "8", "tpu"), "H200 x1": ("cuda", "1", "gpu")}
"""Compiler, devices, and kernels."""

OFTEN = {
    "TPU v5e x8": ("bamba:mixed", "deepseek-v2-lite:decode"),
    "H200 x1": ("qwen3-next:decode",),
}
"""Targets that each change is tested with; the others come at night."""

ATTENTION = {"TPU v5e x8": {"decode": 1, "mixed": 3}, "H200 x1": {"decode": 3, "mixed": 4}}
"""Launches of own kernels for a layer of attention, the write of its KV among them; on TPUs prompts have their own, and
decodes write as they attend."""

LIKE = {"verify": "mixed", "draft": "decode"}
"""Steps that run the kernels of another: tokens behind a sequence's first are verified as a prompt's are computed."""

LAYERS = {
    "TPU v5e x8": {"jamba": (2, 1, 0), "bamba": (2, 1, 0), "qwen3-next": (1, 1, 0), "mamba2": (1, 0, 0)}
    | {"lfm2": (2, 1, 0), "deepseek-v2-lite": (0, 0, 2), "llama": (0, 1, 0), "falcon-h1": (1, 1, 0)},
    "H200 x1": {"jamba": (2, 1, 0), "bamba": (2, 1, 0), "qwen3-next": (3, 1, 0), "mamba2": (2, 0, 0)}
    | {"lfm2": (2, 1, 0), "deepseek-v2-lite": (0, 0, 2), "llama": (0, 2, 0), "falcon-h1": (2, 2, 0)},
}
"""Layers in a program with states, with attention to keys and values, and to latents. TPUs scan over neighbours that
are alike, which stand in the program once."""

STATES = {"lfm2": 1}
"""Kernels of a layer with states: a convolution, and a recurrence where there is one."""

EXPERTS = {"TPU v5e x8": {"jamba": 2}, "H200 x1": {"jamba": 2, "qwen3-next": 8, "deepseek-v2-lite": 2}}
"""Launches for a layer's experts: on GPUs both products; on TPUs the choice and the MLPs, where a device's columns are
whole registers, as a hundred and twenty-eight of Jamba's are and sixty-four of the others' are not."""

ROWS = {
    "TPU v5e x8": {
        "jamba": 3,
        "bamba": 3,
        "qwen3-next": 3,
        "lfm2": 3,
        "deepseek-v2-lite": 2,
        "llama": 3,
        "llama:draft": 1,
        "falcon-h1": 2,
    },
    "H200 x1": {"bamba": 1, "lfm2": 1, "llama": 2, "llama:draft": 1, "falcon-h1": 2},
}
"""Launches of additions with their norms, and of rotations, where rows and heads fill whole registers; on GPUs of
rotations alone."""

GEMMA_4 = {"TPU v5e x8": {"decode": 12, "mixed": 18}, "H200 x1": {"decode": 6, "mixed": 8}}
"""Calls of a local and a global layer that keep KV, and of one of each that reads it and writes none; on TPUs two norms
of each layer besides. On a GPU XLA attends in the global ones, whose heads are of 512."""

KINDS = (*LAYERS["H200 x1"], "gemma-4")
STEPS = [
    *(f"{kind}:{step}" for kind in KINDS if kind != "llama" for step in ("decode", "mixed")),
    *(f"{kind}:verify" for kind in ("jamba", "bamba", "qwen3-next", "mamba2", "lfm2", "llama", "falcon-h1")),
    "llama:draft",
]
"""A plain Llama's own steps are those of `test_aot_step.py`; here its pool holds a draft model's KV too."""


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
        states, attention, latents = (0, 1, 0) if step == "draft" else LAYERS[target][kind]
        of_attention = ATTENTION[target][LIKE.get(step, step)]
        # On a GPU XLA writes latents, in place too.
        of_latents = of_attention - (target == "H200 x1")
        calls = STATES.get(kind, 2) * states + of_attention * attention + of_latents * latents
        calls += EXPERTS[target].get(kind, 0) + ROWS[target].get(name, ROWS[target].get(kind, 0))
        assert sizes["kernel calls"] == calls, name

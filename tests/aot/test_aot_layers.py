"""Tests of what a layer of Llama-3.1-8B and of Qwen3-30B-A3B runs on each TPU, in programs that libtpu compiles."""

import pytest
from environments import run_case

pytestmark = [pytest.mark.aot, pytest.mark.nightly]

LAYERS = {
    "llama-3.1-8b": {
        "v5e-8": {"decode": (12, 0.94), "mixed": (14, 0.87)},
        "v6e-8": {"decode": (12, 0.89), "mixed": (14, 0.70)},
        "v5p-16": {"decode": (12, 0.90), "mixed": (14, 0.81)},
        "tpu7x-8": {"decode": (18, 0.87), "mixed": (20, 0.74)},
    },
    "qwen3-30b-a3b": {
        "v5e-8": {"decode": (18, 0.94), "mixed": (20, 0.85)},
        "v6e-8": {"decode": (18, 0.90), "mixed": (20, 0.77)},
        "v5p-16": {"decode": (18, 0.93), "mixed": (20, 0.82)},
        "tpu7x-8": {"decode": (25, 0.83), "mixed": (27, 0.65)},
    },
}
"""Most operations, and the least share of products in their cycles. On a tpu7x two all-reduces are eight operations."""


@pytest.mark.parametrize(("model", "device"), [(model, device) for model, layer in LAYERS.items() for device in layer])
def test_a_layer_has_few_operations_beside_its_products(model, device):
    rows = run_case("tpu", "tpu-layers", "--devices", device, "--models", model)
    found = {row["step"]: row for row in rows}
    assert set(found) == {"decode", "mixed"}
    for step, (operations, share) in LAYERS[model][device].items():
        assert found[step]["operations"] <= operations
        assert found[step]["products"] >= share
        assert found[step]["sorts"] == found[step]["gathers"] == 0

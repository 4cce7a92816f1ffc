"""What a layer of a Llama-3.1-8B runs on each TPU, in the programs that libtpu compiles for them."""

import pytest
from environments import run_case

pytestmark = [pytest.mark.aot, pytest.mark.nightly]

LAYER = {
    "v5e-8": {"decode": (12, 0.94), "mixed": (14, 0.87)},
    "v6e-8": {"decode": (12, 0.89), "mixed": (14, 0.70)},
    "v5p-16": {"decode": (12, 0.90), "mixed": (14, 0.81)},
    "tpu7x-8": {"decode": (18, 0.87), "mixed": (20, 0.74)},
}
"""Most operations, and the least share of products in their cycles. On a tpu7x two all-reduces are eight operations."""


@pytest.mark.parametrize("device", LAYER)
def test_a_layer_has_few_operations_beside_its_products(device):
    rows = run_case("tpu", "tpu-layers", "--devices", device, "--models", "llama-3.1-8b")
    found = {row["step"]: row for row in rows}
    assert set(found) == {"decode", "mixed"}
    for step, (operations, share) in LAYER[device].items():
        assert found[step]["operations"] <= operations
        assert found[step]["products"] >= share
        assert found[step]["sorts"] == found[step]["gathers"] == 0

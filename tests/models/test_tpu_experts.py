"""On TPUs a layer's experts are one launch of each device, of the layer's own matrices, and their choice is another."""

from pathlib import Path

import pytest
from on_devices import printed_on_devices

PROGRAM = Path(__file__).with_name("tpu_experts_program.py")
LAUNCHES = {"parts of odd columns, biases": {"expert_mlps": 1, "route": 1}, "float32": {}}
"""What the models launch, which are in loops over their layers, by names in `tpu_experts_program.CASES`."""
AT_NIGHT = {
    "a loop": {"expert_mlps": 1, "route": 1},
    "odd columns, biases": {"expert_mlps": 1, "route": 1},
    "columns": {"expert_mlps": 1, "route": 1},
    "tiles of rows": {"expert_mlps": 1},
    "groups": {"expert_mlps": 1},
    "columns, groups": {"expert_mlps": 1},
    "no gates": {"expert_mlps": 1},
    "columns, no gates": {"expert_mlps": 1},
}


@pytest.mark.parametrize(
    ("devices", "launches"),
    [
        (4, LAUNCHES),
        pytest.param(4, AT_NIGHT, marks=pytest.mark.nightly),
        pytest.param(1, LAUNCHES | AT_NIGHT, marks=pytest.mark.nightly),
    ],
    ids=["a case of each dtype on 4", "the others on 4", "all on 1"],
)
def test_a_models_experts_are_launches_that_compute_what_xla_does(devices, launches):
    """Matrices of another layer, or of another device's experts, would give other logits altogether."""
    results = printed_on_devices(devices, PROGRAM, *launches)
    assert {name: result["kernels"] for name, result in results.items()} == launches
    for name, result in results.items():
        assert result["error"] < (1e-5 if name == "float32" else 0.05), name

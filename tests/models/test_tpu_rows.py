"""On TPUs a layer's additions with their norms, and its rotations, are launches that each shard makes for itself."""

from pathlib import Path

import pytest
from on_devices import printed_on_devices

PROGRAM = Path(__file__).with_name("tpu_rows_program.py")


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_a_layer_calls_a_tpus_kernels_of_rows_and_computes_the_same(devices):
    results = printed_on_devices(devices, PROGRAM)
    assert sorted(results) == ["gemma3_text", "llama", "qwen3"]
    for name, result in results.items():
        layer = ["add_rms_norm"] * 2 + ["rotated_heads" if name == "llama" else "normed_rotated_heads"]
        assert sorted(result["kernels"]) == sorted(layer + ["rms_norm"] * 2 * (name == "gemma3_text"))
        assert result["error"] < 1e-5

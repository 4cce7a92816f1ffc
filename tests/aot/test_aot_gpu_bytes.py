"""What a decode step moves on NVIDIA GPUs, in the programs that XLA compiles for them: weights and KV, hardly more."""

import pytest
from environments import run_case

pytestmark = pytest.mark.aot

LAYERS = "2"
MOST = 1.1
"""Bytes moved, as a multiple of those of weights and KV."""


def counted(device, *options):
    (row,) = run_case("cuda", "gpu-bytes", "--layers", LAYERS, "--devices", device, *options)
    return row


NIGHTLY = [pytest.param(device, marks=pytest.mark.nightly) for device in ("l4", "a100", "h200")]


@pytest.mark.parametrize("device", ["t4", *NIGHTLY])
def test_a_float16_step_moves_little_more_than_weights_and_kv(device):
    found = counted(device, "--dtype", "float16")
    assert found["loops"] == 0, "a loop asks the host how often it turns"
    assert found["times"] <= MOST
    head = found["draw, MB"] / found["draw, times the head"]
    assert found["draw, MB"] <= MOST * head + LOGITS / 1e6
    assert found["largest result, MB"] < SMALLEST_MATRIX / 1e6


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("t4", "float16", marks=pytest.mark.nightly),
        pytest.param("l4", "bfloat16", marks=pytest.mark.nightly),
        pytest.param("h200", "bfloat16", marks=pytest.mark.nightly),
    ],
)
def test_a_step_of_4_bit_codes_makes_no_float_copy_of_a_matrix(device, dtype):
    rows = "32" if device == "t4" else "64"
    found = counted(device, "--dtype", dtype, "--quantization", "int4", "--seqs", rows)
    assert found["largest result, MB"] < SMALLEST_MATRIX / 1e6
    assert found["times"] <= MOST


SMALLEST_MATRIX = 4096 * 4096 * 2
"""Bytes of the smallest of a layer's matrices, of two bytes a number."""
LOGITS = 4 * 64 * 128256 * 4
"""Bytes of the logits, read or written four times."""

"""What a decode step launches on NVIDIA GPUs, in the programs that XLA compiles for them."""

import pytest
from environments import run_case

pytestmark = pytest.mark.aot

MOST = {"h200": 14, "a100": 14, "l4": 14, "t4": 13}
"""Launches of a layer."""


@pytest.mark.parametrize(
    "device", ["h200", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("a100", "l4", "t4"))]
)
def test_a_layer_launches_few_kernels_and_recorded_calls_are_all_in_one_command_buffer(device):
    (found,) = run_case("cuda", "gpu-launches", "--devices", device, "--calls", "recorded")
    assert len(found["layer"]) <= MOST[device], found["layer"]
    assert sum("triton_kernel_call" in launch for launch in found["layer"]) == 4
    assert (found["command buffers"], found["outside"]) == (1, 0)


@pytest.mark.nightly
def test_calls_that_do_not_say_that_they_may_be_recorded_stand_outside():
    (found,) = run_case("cuda", "gpu-launches", "--devices", "h200", "--calls", "plain", "--layers", "3")
    assert found["outside"] == 3 * 4


def test_a_batchs_size_alone_has_no_kernel_compiled_again():
    rows = run_case("cuda", "gpu-compiles")
    assert all(row["shapes of steps"] > 20 for row in rows)
    # Units of keys, lanes of sequences and tiles of queries are powers of two, of which there are a few.
    assert {row["kernel"]: row["compiled"] for row in rows} == {
        "attend_to_tiles": 1,
        "attend_to_units": 5,
        "join_units": 5,
        "rotate_heads": 1,
        "write_tokens": 1,
    }

"""The Triton kernels of recurrences and latents without a GPU: their results by Triton's interpreter, and what compiled
ones take of a GPU."""

import json

import pytest
import thorough
from environments import run_program

pytestmark = pytest.mark.aot

SHARED_BYTES = {75: 64 * 1024, 80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
KINDS = ["causal_conv", "selective_scan", "ssd", "gated_delta"]
BATCHES = ["decodes", "prompts among them"]


TARGET, POOL, LATENTS = 90, "int8", ("one tile", "fp8, bfloat16")
"""The GPU, the pool and the latents that each change is tested with; the others come at night."""


def some(names, often):
    """Return parameters, of which those in `often` are tried with each change."""
    return [pytest.param(name, marks=() if name in often else pytest.mark.nightly) for name in names]


def lines_of(program, *often):
    arguments = () if thorough.NIGHTLY else often
    return [json.loads(line) for line in run_program("cuda", program, *arguments).splitlines()]


@pytest.fixture(scope="module")
def errors():
    return {line["name"]: line["error"] for line in lines_of("gpu_states_interpreter_program.py", POOL, *LATENTS)}


@pytest.fixture(scope="module")
def kernels():
    return lines_of("gpu_states_program.py", str(TARGET))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("pool", some(["float32", "bfloat16", "int8"], [POOL]))
def test_decodes_agree_with_float64_in_a_pool_of_any_dtype(errors, name, pool):
    assert errors[f"{name} in {pool}"] < 2e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_convolution_keeps_its_inputs_in_half_precision(errors, dtype):
    assert errors[f"causal_conv of {dtype}"] < 2e-5


@pytest.mark.parametrize("name", some(["one tile", "DeepSeek's widths", "int8"], LATENTS))
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_to_latents_agrees_with_dense_float64_attention(errors, name, batch):
    assert errors[f"{name}: {batch}"] < 2e-5


@pytest.mark.parametrize(
    "name", some(["a value that ends within a tile of its key, bfloat16", "fp8, bfloat16"], LATENTS)
)
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_to_latents_in_bfloat16_agrees_within_its_rounding(errors, name, batch):
    assert errors[f"{name}: {batch}"] < 2e-2


def test_every_kernel_compiles_and_fits_the_gpu(kernels):
    assert {kernel["kernel"] for kernel in kernels if kernel["target"] == 90} == {
        "conv_decodes",
        "scan_decodes",
        "delta_decodes",
        "attend_to_latents",
        "attend_to_latents_of_tiles",
        "join_units",
    }
    assert [kernel for kernel in kernels if kernel["shared"] > SHARED_BYTES[kernel["target"]]] == []
    assert [kernel for kernel in kernels if kernel["spilled"] > 0] == []

"""The TPU kernels compile for real and update the pool in place (DESIGN: one pool, many views)."""

import json
from pathlib import Path

import pytest
import thorough
from environments import run_case, run_program

pytestmark = pytest.mark.aot


PROGRAMS = {
    "decode, tables in HBM": True,
    "mixed, window": True,
    "mixed, chunks": True,
    "mixed, int8": True,
    "block_copy": True,
    "decode": False,
    "mixed": False,
    "mixed, tables in HBM": False,
}
"""Whether each change is tested with a program; the others come at night. A plain decode's and a mixed batch's are in
the steps of `test_aot_step.py`, and the tables of a mixed batch are read as a decode's are."""


@pytest.fixture(scope="module")
def programs():
    names = [name for name, often in PROGRAMS.items() if often or thorough.NIGHTLY]
    lines = run_program("tpu", "kernels_program.py", *names).splitlines()
    return {line["name"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize("name", [name if often else thorough.rarely(name) for name, often in PROGRAMS.items()])
def test_the_pool_is_updated_in_place_on_tpu(programs, name):
    sizes = programs[name]
    assert sizes["alias"] >= sizes["pool"]
    assert sizes["temp"] < 0.05 * sizes["pool"]


ATTENTION = [
    "v5e/llama-3.1-8b x8/decode",
    "v5p/llama-3.3-70b x8/mixed",
    "v6e/gemma-3-27b/decode",
    "tpu7x/qwen3-0.6b/mixed",
    "v5e/gpt-oss-20b/mixed",
    "v5p/llama-3.1-8b/decode/int8",
    "v6e/llama-3.1-8b x8/decode/fp8",
    "v5e/llama-3.1-8b x8/mixed/int8",
    "tpu7x/llama-3.1-8b/mixed/fp8",
]
"""Every target and shape once, and codes with prompts; ``scripts.compiled_code tpu-attention`` compiles all of them."""
OFTEN = ("v5e/gpt-oss-20b/mixed", "v5e/llama-3.1-8b x8/mixed/int8")
"""Shapes that each change is tested with, for one TPU; the others come at night."""
SIMULATED = json.loads((Path(__file__).parent / "simulated_kernels.json").read_text(encoding="utf-8"))
"""Microseconds, bytes and share of empty bundles that launches have had, as `attention_program.py` prints them."""
SIMULATED_AT_NIGHT = ("v5e/llama-3.1-8b x8/decode", "v5e/llama-3.1-8b/kv_write decode")
"""Launches whose parts another has: a decode attends and writes in one, and what is written of a mixed batch takes the
same way."""


@pytest.fixture(scope="module")
def attention_programs():
    often = [name for name in SIMULATED if name not in SIMULATED_AT_NIGHT]
    names = [*ATTENTION, *SIMULATED] if thorough.NIGHTLY else often
    lines = run_program("tpu", "attention_program.py", *dict.fromkeys(names)).splitlines()
    return {line["name"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.nightly) for name in ATTENTION]
)
def test_attention_compiles_within_the_memory_of_every_tpu(attention_programs, name):
    """The compiler refuses a kernel that does not fit VMEM or scalar memory; in HBM it copies no pool."""
    sizes = attention_programs[name]
    assert sizes["temp"] < 0.1 * sizes["view"]


@pytest.mark.parametrize("name", [thorough.rarely(name) if name in SIMULATED_AT_NIGHT else name for name in SIMULATED])
def test_no_kernel_takes_longer_or_moves_more_than_it_did(attention_programs, name):
    """A kernel that has become better has its figures in `simulated_kernels.json` lowered."""
    found, was = attention_programs[name], SIMULATED[name]
    assert found["bytes"] == was["bytes"]
    assert 0.95 * was["us"] <= found["us"] <= 1.03 * was["us"], (found["us"], was["us"])
    assert was["empty"] - 0.05 <= found["empty"] <= was["empty"] + 0.02, (found["empty"], was["empty"])


@pytest.mark.parametrize("target", ["v5e", pytest.param("v5p", marks=pytest.mark.nightly)])
def test_no_kernel_of_rows_takes_more_cycles_than_a_layer_is_counted_with(target):
    """`layer_ops.ROW_KERNELS` says so for every chip; v5e and v5p have the fewest and the most."""
    rows = run_case("tpu", "tpu-rows", "--targets", target)
    assert len(rows) == 5 * 2
    for row in rows:
        assert 0 < row["bundles"] <= row["counted as"]
        assert row["bytes"] > 0


@pytest.mark.parametrize(
    ("target", "shape", "tokens"),
    [
        ("v5e", "qwen3-30b-a3b x8", 64),
        pytest.param("v5p", "qwen3-30b-a3b x8", 1, marks=pytest.mark.nightly),
        pytest.param("v5e", "qwen3-30b-a3b x8", 24, marks=pytest.mark.nightly),
        pytest.param("v5e", "qwen3-30b-a3b x8", 640, marks=pytest.mark.nightly),
        pytest.param("v6e", "qwen3-next-80b-a3b x8", 512, marks=pytest.mark.nightly),
        pytest.param("v6e", "gpt-oss-20b x8", 64, marks=pytest.mark.nightly),
        pytest.param("tpu7x", "gpt-oss-20b x8", 64, marks=pytest.mark.nightly),
        pytest.param("tpu7x", "mixtral-8x7b x8", 1024, marks=pytest.mark.nightly),
        pytest.param("tpu7x", "glm-4.5 x8", 512, marks=pytest.mark.nightly),
        pytest.param("tpu7x", "deepseek-v3 x8", 384, marks=pytest.mark.nightly),
    ],
)
def test_experts_are_multiplied_where_they_lie_and_fit_the_memory_of_every_tpu(target, shape, tokens):
    """A tpu7x has the least VMEM, all of which 384 tokens of DeepSeek-V3's width take."""
    options = ("--targets", target, "--shapes", shape, "--tokens", str(tokens), "--kernels", "jpaged")
    (row,) = run_case("tpu", "tpu-experts", *options)
    assert row["kernels"] == 1 and row["us"] >= row["bytes at HBM's peak, us"]
    assert row["copied"] == 0 and row["temporaries"] < 1 << 20

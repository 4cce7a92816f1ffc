"""The Triton kernels without a GPU: their results by Triton's interpreter, and what compiled ones take of a GPU."""

import json

import pytest
import thorough
from environments import run_program

pytestmark = pytest.mark.aot

SHARED_BYTES = {75: 64 * 1024, 80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most a program may use; the code of sm_80 also runs on sm_86 and sm_89, which have 99 KiB. sm_75 runs
float16 only."""
MAX_SPILLED_BYTES = {75: 192, 80: 64, 90: 64, 100: 64}
"""Registers of a thread kept in memory: more than a few would show. On sm_75 heads of 256 have more."""
HELD_IN = ("int8", "fp8")
IN_BYTES = ("llama heads", "padded packed rows, sinks", "decode only, two rows of scales a block")
IN_BYTES_OF_BFLOAT16 = ("decode only, window", "two lane tiles, soft cap")


OFTEN = (
    "decode only, soft cap and window",
    "images",
    "fp8 of sm_90, padded packed rows, sinks",
    "int8, llama heads",
    "decode only, units of several sequences",
    "padded packed rows, bfloat16",
    "block ids out of range",
    "fp8, decode only, window, bfloat16",
    "decode only, odd group, float16",
    "sm_75, decode only, odd group, float16",
    "write heads of 128",
    "write int8 heads of 48",
    "write fp8 heads of 128",
    "read float8",
    "round to float8",
    "copy a chain and a swap",
    "copy nowhere and from nowhere",
    "copy one block",
    *(f"experts{dtype}" for dtype in ("", ", bfloat16", ", float16")),
    *(
        f"product, {form}, {dtype}"
        for form in ("4 bits, columns that fill no tile", "int8, groups of 16 with minimums", "float8", "MXFP4")
        for dtype in ("bfloat16", "float16")
    ),
    *(f"experts, 4 bits, {dtype}" for dtype in ("bfloat16", "float16")),
    *(f"heads rotated in part, padded, {dtype}" for dtype in ("float32", "bfloat16", "float16")),
)
"""Cases that each change is tested with: one of each kernel and of each form that it reads. Others come at night."""

TARGET = 90
SHAPES = ("Llama-3.1-8B", "Llama-3.1-8B, int8 KV", "Gemma-2-9B", "Gemma-3-4B, images", "OPT-125m, float32")
"""The GPU that each change is compiled for, and at which models' shapes; the others come at night."""


def case(name, judged=None):
    """Return a parameter that is tried with each change if the case of its name is, or the one `judged`."""
    return pytest.param(name, marks=() if (judged or name) in OFTEN else pytest.mark.nightly)


def lines_of(program, *often):
    arguments = () if thorough.NIGHTLY else often
    return [json.loads(line) for line in run_program("cuda", program, *arguments).splitlines()]


@pytest.fixture(scope="module")
def errors():
    return {line["name"]: line["error"] for line in lines_of("gpu_interpreter_program.py", *OFTEN)}


@pytest.fixture(scope="module")
def kernels():
    return lines_of("gpu_kernels_program.py", str(TARGET), *SHAPES)


@pytest.mark.parametrize(
    "name",
    [
        case(name)
        for name in (
            "llama heads",
            "decode only, soft cap and window",
            "decode only, chunks",
            "one query head a KV head, packed rows",
            "padded rows",
            "window shorter than a block, odd group",
            "sinks and a window, odd group",
            "decode only, sinks",
            "blocks of 8",
            "blocks of 24",
            "chunks shorter than a block",
            "images",
            "images, a shorter window, odd group",
            "fp8 of sm_90, padded packed rows, sinks",
            *(f"{held_in}, {name}" for held_in in HELD_IN for name in IN_BYTES),
        )
    ],
)
def test_attention_agrees_with_dense_float64_attention(errors, name):
    assert errors[name] < 2e-5


@pytest.mark.parametrize(
    "name",
    [
        case(name)
        for name in (
            "decode only, units of several sequences",
            "padded packed rows, bfloat16",
            "two lane tiles, soft cap and window, bfloat16",
            "several tiles of queries",
            "images, two lane tiles, window, bfloat16",
            "block ids out of range",
            "fp8 of sm_90, decode only, window, bfloat16",
            *(f"{held_in}, {name}, bfloat16" for held_in in HELD_IN for name in IN_BYTES_OF_BFLOAT16),
        )
    ],
)
def test_attention_in_bfloat16_agrees_within_its_rounding(errors, name):
    assert errors[name] < 2e-2


@pytest.mark.parametrize(
    "name",
    [
        case(name, f"{name}, float16")
        for name in (
            "decode only, odd group",
            "two lane tiles, soft cap and window",
            "several tiles of queries",
            *(f"{held_in}, decode only, window" for held_in in HELD_IN),
        )
    ],
)
def test_attention_in_float16_agrees_within_its_rounding(errors, name):
    assert errors[f"{name}, float16"] < 3e-3


@pytest.mark.parametrize(
    "name",
    [
        case(name, f"sm_75, {name}, float16")
        for name in (
            "decode only, odd group",
            "several tiles of queries",
            "experts",
        )
    ],
)
def test_kernels_in_the_tiles_of_a_t4_agree_within_float16s_rounding(errors, name):
    assert errors[f"sm_75, {name}, float16"] < 3e-3


@pytest.mark.parametrize(
    "name",
    [
        case(name)
        for name in (
            "write heads of 128",
            "write heads of 48",
            "write heads of 256",
            "write heads of 128, float16",
            *(f"write {held_in} heads of {width}" for held_in in HELD_IN for width in (128, 48, 256)),
            "read float8",
            "round to float8",
            "copy a chain and a swap",
            "copy nowhere and from nowhere",
            "copy one block",
        )
    ],
)
def test_writes_and_copies_leave_exactly_what_the_reference_leaves(errors, name):
    assert errors[name] == 0


@pytest.mark.parametrize(
    "name",
    [
        case(name, f"{name}, bfloat16")
        for name in (
            "experts",
            "experts, none of them twice",
            "no rows of experts",
            "more experts than rows",
        )
    ],
)
def test_rows_meet_their_experts_and_others_give_nothing_on_a_gpu(errors, name):
    assert errors[name] < 2e-5
    assert errors[f"{name}, bfloat16"] < 2e-2
    assert errors[f"{name}, float16"] < 3e-3


@pytest.mark.parametrize(
    "name",
    [
        case(name, f"product, {name}, bfloat16")
        for name in (
            "4 bits, one row",
            "4 bits, columns that fill no tile",
            "4 bits, several tiles of rows",
            "4 bits, groups of 128",
            "4 bits, inputs shared out",
            "4 bits, a table",
            "int8",
            "int8, inputs shared out",
            "int8, a table",
            "int8, groups of 16 with minimums",
            "int8, groups of 32",
            "float8",
            "MXFP4",
        )
    ],
)
def test_products_with_codes_are_rounded_once(errors, name):
    """To the dtype of the result: codes, scales and sums lose nothing."""
    assert errors[f"product, {name}, bfloat16"] < 2**-8
    assert errors[f"product, {name}, float16"] < 2**-11 + 1e-5


@pytest.mark.parametrize(
    "name",
    [
        case(f"{name}, {form}", f"{name}, {form}, bfloat16")
        for form in ("4 bits", "MXFP4", "int8")
        for name in ("experts", "no rows of experts", "more experts than rows")
    ],
)
def test_rows_meet_the_codes_of_their_experts(errors, name):
    assert errors[f"{name}, bfloat16"] < 2**-8
    assert errors[f"{name}, float16"] < 2**-11 + 1e-5


@pytest.mark.parametrize(
    "name",
    [
        case(name, f"{name}, bfloat16")
        for name in (
            "heads rotated",
            "heads rotated, odd group",
            "heads rotated in part, padded",
        )
    ],
)
def test_joined_heads_are_taken_apart_and_rotated_within_rounding(errors, name):
    assert errors[f"{name}, float32"] < 1e-6
    assert errors[f"{name}, float16"] < 4e-3
    assert errors[f"{name}, bfloat16"] < 3e-2


@pytest.mark.parametrize(
    "target", [pytest.param(of, marks=() if of == TARGET else pytest.mark.nightly) for of in SHARED_BYTES]
)
def test_every_kernel_compiles_and_fits_the_gpu(kernels, target):
    mine = [kernel for kernel in kernels if kernel["target"] == target]
    assert {kernel["kernel"] for kernel in mine} == {
        "attend_to_units",
        "attend_to_tiles",
        "join_units",
        "write_tokens",
        "write_codes",
        "copy_columns",
        "multiply_groups",
        "multiply_codes",
        "multiply_code_groups",
        "rotate_heads",
    }
    assert [kernel for kernel in mine if kernel["shared"] > SHARED_BYTES[target]] == []
    assert [kernel for kernel in mine if kernel["spilled"] > MAX_SPILLED_BYTES[target]] == []


@pytest.mark.parametrize("shape", ["Llama-3.1-8B", "Llama-3.1-8B, int8 KV"])
def test_a_decode_leaves_room_for_three_programs_on_an_h100(kernels, shape):
    (decode,) = (
        kernel
        for kernel in kernels
        if (kernel["target"], kernel["shape"], kernel["kernel"]) == (90, shape, "attend_to_units")
    )
    assert 3 * decode["shared"] <= 227 * 1024
    assert 3 * 128 * decode["registers"] <= 65536

"""Bytes are counted in a program's text as a GPU moves them."""

import pytest

from scripts.compiled_code.hlo_bytes import largest_result, moved_bytes


def program(*lines: str, more: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_f, is_scheduled=true\n\n{more}\nENTRY %main.1 (p: f16[4]) -> f16[4] {{\n{body}\n}}\n"


def test_a_product_by_cublas_reads_both_and_writes_one_without_its_scratch_memory():
    text = program(
        "%x = f16[64,128]{1,0} parameter(0)",
        "%w = f16[128,256]{1,0} parameter(1)",
        "%gemm = (f16[64,256]{1,0}, s8[4194304]{0}) custom-call(%x, %w), "
        'custom_call_target="__cublas$gemm", metadata={op_name="jit(f)/dot(general)"}',
        "ROOT %out = f16[64,256]{1,0} get-tuple-element(%gemm), index=0",
    )
    moved = moved_bytes(text)
    assert moved.total == 2 * (64 * 128 + 128 * 256 + 64 * 256)
    assert (moved.operations, list(moved.by_kind)) == (1, ["__cublas$gemm"])


SLICED = """%fused (a: f16[1000,8], i: s32[]) -> f16[2,8] {
  %a = f16[1000,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f16[2,8]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={2,8}
}
"""


def test_of_a_table_that_a_fusion_slices_the_slice_is_counted():
    text = program(
        "%a = f16[1000,8]{1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "ROOT %fusion = f16[2,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused",
        more=SLICED,
    )
    assert moved_bytes(text).total == 2 * 2 * 8 * 2 + 4


UPDATED = """%fused (a: f32[1000], u: f32[10], i: s32[]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %u = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %update = f32[1000]{0} dynamic-update-slice(%a, %u, %i)
}
"""


def test_of_an_array_that_is_updated_in_place_the_update_is_counted():
    text = program(
        "%a = f32[1000]{0} parameter(0)",
        "%u = f32[10]{0} parameter(1)",
        "%i = s32[] parameter(2)",
        "ROOT %fusion = f32[1000]{0} fusion(%a, %u, %i), kind=kLoop, calls=%fused",
        more=UPDATED,
    )
    assert moved_bytes(text).total == 40 + 4 + 40


LOOP = """%body (s: (s32[], f32[100])) -> (s32[], f32[100]) {
  %s = (s32[], f32[100]{0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %x = f32[100]{0} get-tuple-element(%s), index=1
  %y = f32[100]{0} negate(%x)
  ROOT %t = (s32[], f32[100]{0}) tuple(%n, %y)
}

%condition (s: (s32[], f32[100])) -> pred[] {
  %s = (s32[], f32[100]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""


def looping(known: str) -> str:
    return program(
        "%s = (s32[], f32[100]{0}) parameter(0)",
        "ROOT %loop = (s32[], f32[100]{0}) while(%s), condition=%condition, body=%body" + known,
        more=LOOP,
    )


def test_every_turn_of_a_loop_counts_and_it_must_be_known_how_many_there_are():
    moved = moved_bytes(looping(', backend_config={"known_trip_count":{"n":"7"}}'))
    assert (moved.total, moved.operations) == (7 * 800, 7)
    with pytest.raises(ValueError, match="loop: a loop of which the compiler does not know how often it turns"):
        moved_bytes(looping(""))


def test_a_pool_is_not_counted_and_not_the_largest_result():
    text = program(
        "%pool = bf16[100,1000]{1,0} parameter(0)",
        "%x = bf16[10]{0} parameter(1)",
        "%written = (bf16[100,1000]{1,0}, f32[20]{0}) custom-call(%pool, %x), "
        'custom_call_target="triton_kernel_call", output_to_operand_aliasing={{0}: (0, {})}',
        "ROOT %out = f32[20]{0} get-tuple-element(%written), index=1",
    )
    assert moved_bytes(text, pool_bytes=200_000).total == 20 + 80
    assert largest_result(text, pool_bytes=200_000) == 80
    assert largest_result(text) == 200_000


def test_a_copy_in_a_wider_dtype_is_found():
    text = program(
        "%w = bf16[64,64]{1,0} parameter(0)",
        "ROOT %wide = f32[64,64]{1,0} convert(%w)",
    )
    assert moved_bytes(text).total == 64 * 64 * 6
    assert largest_result(text) == 64 * 64 * 4

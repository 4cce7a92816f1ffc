"""The counting of a layer's operations, on a loop small enough to count by hand."""

from scripts.compiled_code.layer_ops import LAUNCH, estimated_cycles, layer_ops

LOOP = """
%body (carry: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %carry = (s32[], f32[8], f32[8]) parameter(0)
  %number = s32[] get-tuple-element(%carry), index=0
  %hidden = f32[8] get-tuple-element(%carry), index=1
  %table = f32[8] get-tuple-element(%carry), index=2
  %one = s32[] constant(1)
  %sorted = f32[8] sort(%table), dimensions={0}
  %doubled = f32[8] multiply(%sorted, %sorted), backend_config={"estimated_cycles":"1824"}
  %copied = (f32[8], f32[8], u32[]) copy-start(%table)
  %there = f32[8] copy-done(%copied)
  %turned = f32[8] fusion(%hidden), metadata={op_name="tkrd,de->tkre/dot_general"}, config={"estimated_cycles":"2000"}
  %next = s32[] add(%number, %one), metadata={op_name="add"}
  %product = f32[8] fusion(%hidden, %doubled), metadata={op_name="dot_general"}, config={"estimated_cycles":"20000"}
  ROOT %result = (s32[], f32[8], f32[8]) tuple(%next, %product, %table)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8], f32[8]) while(%start), condition=%condition, body=%body
}
"""


def test_operations_that_need_only_what_the_loop_does_not_change_are_told_apart():
    counted = layer_ops(LOOP)
    assert counted == {
        "operations": 5,
        "cycles": 23824,
        "row kernels": 0,
        "products": 20000,
        "sorts": 1,
        "gathers": 0,
        "copies": 1,
        "the same for all layers": 2,
    }


def test_a_kernel_in_the_place_of_operations_is_counted_by_its_numbers_and_one_of_the_pool_is_not():
    """64 x 4096 numbers are 128 times 16 x 128, and 64 x 768 are 24 times."""
    operations = """
  %hidden = (bf16[64,4096]{1,0}, bf16[64,4096]{1,0}) get-tuple-element(%carry), index=1
  %sum = bf16[64,4096]{1,0:T(8,128)S(1)} get-tuple-element(%carry), index=3
  %heads = bf16[64,768]{1,0} get-tuple-element(%carry), index=4
  %add_rms_norm.2 = (bf16[64,4096]{1,0}, bf16[64,4096]{1,0}) custom-call(%sum, %hidden), custom_call_target="x"
  %rotated_heads.1 = (bf16[64,1,4,128]{3,2,1,0}, bf16[1]{0}) custom-call(%heads, %table), custom_call_target="x"
  %kv_write.1 = bf16[1024,32]{1,0} custom-call(%heads, %table), custom_call_target="x"
"""
    with_kernels = layer_ops(LOOP.replace("  %one = ", operations + "  %one = "))
    kernels = 1800 + 12 * 128 + 1800 + 21 * 24
    assert with_kernels["row kernels"] == kernels
    assert with_kernels["cycles"] == 23824 + kernels
    assert with_kernels["operations"] == 5 + 3


def test_a_part_of_a_matrix_that_is_fetched_while_others_run_is_a_copy():
    operations = """
  %begun = ((f32[8]), f32[4], s32[]) slice-start(%table)
  %fetched = f32[4] slice-done(%begun)
  %joined = f32[8] custom-call(%fetched, %fetched), custom_call_target="ConcatBitcast"
"""
    counted = layer_ops(LOOP.replace("  %one = ", operations + "  %one = "))
    assert counted == layer_ops(LOOP) | {"copies": 2}


def test_products_of_experts_take_as_long_as_memory_takes_to_deliver_the_matrices_of_a_layer():
    """64 experts' 128 x 256 and 128 x 128 numbers of two bytes each, at 512 bytes a cycle."""
    operations = """
  %gate_up = bf16[4,64,128,256]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=1
  %down = bf16[4,64,128,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=3
  %rows = bf16[64,128]{1,0} get-tuple-element(%carry), index=4
  %expert_mlps.1 = bf16[64,128]{1,0} custom-call(%one, %rows, %gate_up, %down), custom_call_target="x"
"""
    text = LOOP.replace("  %next = ", operations + "  %next = ")
    cycles = LAUNCH + 64 * 128 * (256 + 128) * 2 // 512
    assert layer_ops(text)["products"] == 20000
    assert layer_ops(text, 512)["products"] == 20000 + cycles
    assert layer_ops(text, 512)["cycles"] == 23824 + cycles


def test_operations_next_to_kernels_are_counted_in_a_program_without_loops():
    program = """
ENTRY %main.1 (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %doubled = f32[8] multiply(%x, %x), backend_config={"estimated_cycles":"1824"}
  ROOT %kernel = f32[8] custom-call(%doubled), custom_call_target="tpu_custom_call"
}
"""
    assert estimated_cycles(program) == (1, 1824)

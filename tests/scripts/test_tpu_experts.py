"""What is counted of the programs that multiply experts' matrices."""

from scripts.compiled_code.tpu_experts import SHAPES, Experts, copied_bytes


def test_matrices_that_are_written_for_a_kernel_are_copied_bytes_and_its_results_are_not():
    """Of two experts' 128 x 512 and 256 x 128 numbers of two bytes."""
    program = """
%body (x: bf16[2,128,512]) -> bf16[2,128,512] {
  %within = bf16[2,128,512]{2,1,0} copy(%x)
}

ENTRY %main (gate_up: bf16[4,2,128,512]) -> bf16[64,128] {
  %gate_up = bf16[4,2,128,512]{3,2,1,0} parameter(0)
  %columns = bf16[1,2,128,512]{3,2,1,0:T(8,128)(2,1)} dynamic-slice(%gate_up, %number)
  %lines = bf16[2,256,128]{2,1,0} fusion(%down, %number), kind=kLoop
  %rows = bf16[64,128]{1,0} fusion(%x)
  ROOT %out = bf16[64,128]{1,0} custom-call(%rows, %columns, %lines)
}
"""
    assert copied_bytes(program, Experts(2, 2, 1, 128, 256)) == 2 * 2 * 128 * (512 + 256)


def test_the_matrices_of_a_shape_are_gate_up_and_down_of_two_bytes():
    assert SHAPES["qwen3-30b-a3b x8"].table_bytes == 16 * 3 * 2048 * 768 * 2

"""What is counted of the kernels that multiply experts' matrices, where their schedules can be read and where not."""

import pytest

from scripts.compiled_code.tpu_experts import SHAPES, Experts, copied_bytes, kernel_cycles

COPY = "%1 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1, /*size_in_granules=*/{}, /*vmem=*/%s2"
MULTIPLY = "%9 = vmatmul.bf16.gmra.mxu0 %v3"


def schedule(*bundles):
    """A dump of a loop of these bundles, its branch back and the four that still run."""
    first, *rest = [*bundles, "%5 = sbr.rel (!%p1_p0) target = $region7", "", "", "", ""]
    lines = [f" 0x0 LB: > {{ {first} }} /* Start region 7 */"]
    return "\n".join(lines + [f" {hex(place)} : > {{ {text} }} /* */" for place, text in enumerate(rest, 1)])


COPIES = schedule(COPY.format(4), MULTIPLY)
MULTIPLIES = schedule(MULTIPLY)


def test_a_kernels_cycles_are_those_of_a_turn_as_often_as_its_loop_turns():
    assert kernel_cycles([COPIES], lambda place: 10) == (10 * 7, "")


def test_two_kernels_each_turn_as_often_as_their_own_loops():
    """The second starts no copies in the loop that multiplies."""
    assert kernel_cycles([COPIES, MULTIPLIES], lambda place: [10, 3][place]) == (10 * 7 + 3 * 6, "")


@pytest.mark.parametrize(
    ("unreadable", "why"),
    [
        (schedule(COPY.format("%s9"), MULTIPLY), "a DMA whose size is not a constant"),
        (schedule(COPY.format(4)), "no loop with most of the matrix products"),
        ("nothing here", "no bundles in what should be a dump of final bundles"),
    ],
)
def test_one_kernel_that_cannot_be_read_leaves_the_cycles_of_all_unknown(unreadable, why):
    assert kernel_cycles([COPIES, unreadable], lambda place: 10) == (None, why)


def test_turns_that_a_kernels_text_does_not_say_leave_its_cycles_unknown():
    def turns(place):
        raise ValueError("a kernel without bounds of iterations")

    assert kernel_cycles([COPIES], turns) == (None, "a kernel without bounds of iterations")


def test_a_kernel_without_a_schedule_does_not_take_no_time():
    assert kernel_cycles([], lambda place: 10) == (None, "no schedule of such a kernel")


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

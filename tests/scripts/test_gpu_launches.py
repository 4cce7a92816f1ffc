"""A layer's launches are counted between one layer's first kernel of Triton and the next one's."""

import pytest

from scripts.compiled_code.gpu_launches import launches_of_layer, recorded

LAYER = """
  %product.N = f16[4]{0} custom-call(%x), custom_call_target="__cublas$gemm"
  %kernel.N = f16[4]{0} custom-call(%product.N), custom_call_target="triton_kernel_call"
  %same.N = f16[4]{0} bitcast(%kernel.N)
  %norm.N = f16[4]{0} fusion(%same.N), kind=kLoop, calls=%inner
"""


def program(layers):
    body = "".join(LAYER.replace("N", str(number)) for number in range(layers))
    head = (
        "HloModule jit_steps, is_scheduled=true\n\nENTRY %main.1 (x: f16[4]) -> f16[4] {\n  %x = f16[4]{0} parameter(0)"
    )
    return f"{head}{body}  ROOT %out = f16[4]{{0}} copy(%x)\n}}\n"


def test_what_stands_between_two_layers_first_kernels_is_a_layer():
    layer, step = launches_of_layer(program(3), 3)
    assert layer == ["triton_kernel_call: kernel.1", "fusion: norm.1", "__cublas$gemm: product.2"]
    assert step == 3 * 3 + 1


def test_layers_with_different_numbers_of_kernels_are_refused():
    with pytest.raises(ValueError, match="3 launches of Triton are not the same number for each of 2 layers"):
        launches_of_layer(program(3), 2)


def test_launches_outside_of_command_buffers_are_told_from_those_inside():
    thunks = """\
000: kCommandBuffer [source       | next=010 (1)]
    001: kCustomKernel [source       | sink        ] loop_broadcast_fusion grid: [1, 1, 1]
    002: kCustomKernel [source       | next=007 (5)] loop_cosine_sine_fusion grid: [32, 1, 1]
010: kCustomCall    [prev=000 (1) | next=011 (1)] kCustomCall
000: kCommandBuffer [prev=012 (1) | next=026 (1)]
    013: kCustomKernel [source       | next=014 (1)] gemm_fusion_dot_1 grid: [16384, 1, 1]
"""
    assert recorded(thunks) == {"command buffers": 2, "outside": 1}

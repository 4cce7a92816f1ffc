"""The counting of a layer's operations, on a loop small enough to count by hand."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from layer_ops import layer_ops

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
        "products": 20000,
        "sorts": 1,
        "gathers": 0,
        "copies": 1,
        "the same for all layers": 2,
    }

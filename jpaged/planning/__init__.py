"""Will a model fit hardware you do not have, and how fast could it be? No weights are needed.

`plan` asks a child process (`child`, `compile_step`) whose environment has the target's compiler (`compilers`) to
compile the engine's own step for it (`targets`), and sizes the pool as the engine would (`jpaged.memory_plan`).
`devices` is the table of known hardware, `work` and `roofline` the speed it allows, `estimate` what is told without
a compiler.
"""

from jpaged.planning.devices import DEVICES, find_device
from jpaged.planning.planner import plan
from jpaged.planning.result import GroupPlan, Plan

__all__ = ["DEVICES", "GroupPlan", "Plan", "find_device", "plan"]

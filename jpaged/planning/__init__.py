"""Tells whether a model will fit hardware you do not have, and how fast it could be. No weights are needed.

`plan` asks a child process (`child`, `compile_step`) whose environment has the target's compiler (`compilers`) to
compile the engine's own step for it (`target_mesh`), and sizes the pool as the engine would
(`jpaged.engine.memory_plan`). `devices` is the table of known hardware, `work` and `roofline` the speed it allows,
`machine` what this machine can do, and `estimate` what is told without a compiler.
"""

from jpaged.planning.devices import DEVICES, find_device
from jpaged.planning.planner import plan, published_shapes
from jpaged.planning.result import GroupPlan, Plan

__all__ = ["DEVICES", "GroupPlan", "Plan", "find_device", "plan", "published_shapes"]

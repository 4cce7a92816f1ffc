"""Tells whether a model will fit hardware you do not have, and how fast it could be. No weights are needed.

`plan` asks a child process (`child`, `compile_step`) whose environment has the target's compiler (`child_process`) to
compile the engine's own step for it (`target_mesh`), and sizes the pool as the engine would
(`jpaged.engine.memory_plan`). `compile_programs_for` has another such child (`write_programs`) compile all shapes of an
engine into a folder that the device's engine reads. `devices` is the table of known hardware, `roofline` the speed
it allows, `machine` what this machine can do, and `estimate` the figures without a compiler.
"""

from jpaged.planning.child_process import published_shapes
from jpaged.planning.devices import DEVICES, find_device
from jpaged.planning.planner import plan
from jpaged.planning.programs_for import compile_programs_for
from jpaged.planning.result import GroupPlan, Plan

__all__ = ["DEVICES", "GroupPlan", "Plan", "compile_programs_for", "find_device", "plan", "published_shapes"]

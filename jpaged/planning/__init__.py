"""Tells whether a model will fit hardware you do not have, and how fast it could be. No weights are needed.

`plan` asks a child process (`child`, `compile_step`) whose environment has the target's compiler (`child_process`) to
compile the engine's own step for it (`target_mesh`), and sizes the pool as the engine would
(`jpaged.engine.memory_plan`). `compile_programs_for` has another such child (`write_programs`) compile all shapes of an
engine into a folder that the device's engine reads. `devices` is the table of known hardware, `roofline` the speed
it allows, `machine` what this machine can do, and `estimate` the figures without a compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.planning.child_process import published_shapes
    from jpaged.planning.devices import DEVICES, find_device
    from jpaged.planning.planner import plan
    from jpaged.planning.programs_for import compile_programs_for
    from jpaged.planning.result import GroupPlan, Plan

_HOMES = {
    "DEVICES": "jpaged.planning.devices",
    "GroupPlan": "jpaged.planning.result",
    "Plan": "jpaged.planning.result",
    "compile_programs_for": "jpaged.planning.programs_for",
    "find_device": "jpaged.planning.devices",
    "plan": "jpaged.planning.planner",
    "published_shapes": "jpaged.planning.child_process",
}

__all__ = ["DEVICES", "GroupPlan", "Plan", "compile_programs_for", "find_device", "plan", "published_shapes"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first needed: what a command checks first needs no jax."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value

"""What happens on the devices: pure functions and the arrays they are given. No policy is decided here.

`plan_pool` cuts device memory into the pool, `BatchBuilder` turns a `ScheduledStep` into arrays padded to a
`Bucket`, `make_step` and `make_sample_step` are the jitted functions, and `Runner` owns the device state and runs
ahead by a step.
"""

from jpaged.execution.buckets import Bucket, Buckets
from jpaged.execution.compile_cache import enable_compilation_cache
from jpaged.execution.mesh import make_mesh, platform
from jpaged.execution.pool import PoolSpec, group_specs, make_pool, plan_pool
from jpaged.execution.runner import InFlight, Runner
from jpaged.execution.sample_step import StepOutput, make_sample_step
from jpaged.execution.step import make_step

__all__ = [
    "Bucket",
    "Buckets",
    "InFlight",
    "PoolSpec",
    "Runner",
    "StepOutput",
    "enable_compilation_cache",
    "group_specs",
    "make_mesh",
    "make_pool",
    "make_sample_step",
    "make_step",
    "plan_pool",
    "platform",
]

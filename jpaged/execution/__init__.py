"""Runs on the devices: pure functions and the arrays they are given. No policy is decided here.

`caches` has what each kind of layer does with its blocks, and the pool that holds them. `BatchBuilder` turns a
`ScheduledStep` into arrays padded to a `Bucket`, `make_step` and `make_sample_step` are the jitted functions,
`ModelPrograms` holds those of one model with its weights, a `Worker` the device state, and the `Runner` tells it what
to do, ahead of the host by a step.
"""

from jpaged.execution.caches.pool import PoolSpec, make_pool, plan_pool
from jpaged.execution.compile.buckets import Bucket, Buckets
from jpaged.execution.compile.cache import enable_compilation_cache
from jpaged.execution.mesh import make_mesh, platform
from jpaged.execution.readouts.base import InFlight, StepResults
from jpaged.execution.runner import Runner
from jpaged.execution.sampling.sample_step import StepOutput, make_sample_step
from jpaged.execution.step import make_step
from jpaged.execution.step_settings import StepSettings

__all__ = [
    "Bucket",
    "Buckets",
    "InFlight",
    "PoolSpec",
    "Runner",
    "StepOutput",
    "StepResults",
    "StepSettings",
    "enable_compilation_cache",
    "make_mesh",
    "make_pool",
    "make_sample_step",
    "make_step",
    "plan_pool",
    "platform",
]

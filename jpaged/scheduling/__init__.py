"""Plans which tokens run next. Host only: nothing here imports jax, so tests run by the thousand in milliseconds.

`Scheduler` turns waiting and running `Request`s into a `ScheduledStep` (iteration-level scheduling, FCFS or by
priority, chunked prefill under a token budget, preemption of the last in that order, all or nothing) and takes the
sampled tokens back.
"""

from jpaged.scheduling.admission import NoRoom
from jpaged.scheduling.beam import BeamSearch
from jpaged.scheduling.preemption import PreemptionMode
from jpaged.scheduling.queues import SchedulingPolicy
from jpaged.scheduling.request import Request, Sequence, Status
from jpaged.scheduling.scheduler import Scheduler
from jpaged.scheduling.step import Chunk, Sample, ScheduledStep

__all__ = [
    "BeamSearch",
    "Chunk",
    "NoRoom",
    "PreemptionMode",
    "Request",
    "Sample",
    "ScheduledStep",
    "Scheduler",
    "SchedulingPolicy",
    "Sequence",
    "Status",
]

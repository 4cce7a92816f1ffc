"""Joins several processes into one engine: process 0 schedules, the others make the same device calls.

`join` finds the processes that `jax.distributed` brought together. The `Leader` announces every device call of its
`Worker` before making it; each `Follower` makes the same calls, in the same order. `jpaged.execution.wire` is
what they say, `connection` how it travels and how a dead process is noticed, `watch` how a run ends that has lost one.
"""

from functools import partial
from typing import TYPE_CHECKING

from jpaged.distributed.follower import Follower
from jpaged.distributed.join import join
from jpaged.distributed.leader import Leader
from jpaged.vllm_refusals import name_in

__all__ = ["Follower", "Leader", "join"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = partial(name_in, __name__)

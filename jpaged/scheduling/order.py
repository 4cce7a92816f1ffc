"""Who is served first, and so who is preempted last (PagedAttention, section 4.5)."""

from __future__ import annotations

from typing import Literal

from jpaged.scheduling.request import Request

SchedulingPolicy = Literal["fcfs", "priority"]


def urgency(request: Request) -> int:
    """Return the priority value: a lower one is more urgent. Without priorities all requests are alike."""
    return request.priority or 0


def service_order(request: Request) -> tuple[int, int]:
    """Return the sort key: the lower priority value first, then arrival. Without priorities that is first come, first
    served."""
    return urgency(request), request.arrival_number

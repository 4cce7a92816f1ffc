"""Who is served first, and so who is preempted last (PagedAttention, section 4.5)."""

from __future__ import annotations

from typing import Literal

from jpaged.scheduling.request import Request

SchedulingPolicy = Literal["fcfs", "priority"]


def service_order(request: Request) -> tuple[int, int]:
    """Sort key: the lower priority value first, then arrival. Without priorities that is first come, first served."""
    return request.priority or 0, request.arrival_number

"""The queues of unfinished requests, their service order, and the moves between queues.

A request waits, runs, or is swapped out. The order of service decides which one enters the batch first and which one is
preempted last (PagedAttention, section 4.5).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal, TypeAlias

from jpaged.scheduling.request import Request, Sequence, Status

SchedulingPolicy = Literal["fcfs", "priority"]


Alone: TypeAlias = tuple[Sequence, int] | None
"""A running request's only sequence and the most tokens that it may have, if its decodes take only a row of the step;
None = the request has to be looked at."""


def urgency(request: Request) -> int:
    """Return the priority value: a lower one is more urgent. Without priorities all requests are alike."""
    return request.priority or 0


def service_order(request: Request) -> tuple[int, int]:
    """Return the sort key: the lower priority value first, then arrival. Without priorities that is first come, first
    served."""
    return urgency(request), request.arrival_number


class Queues:
    """Holds every unfinished request in the queue that its status names, each queue in service order.

    Attributes:
        waiting, running, swapped: the queues. Callers may keep a reference to one of them: the list objects stay.
        alone: `running` in short, in the same order: each step looks at every sequence, and at few of the requests.
        filling: running requests of which several tokens may be still to be computed, as of a prompt or of a run that
            a grammar forced. All others have but one; `Admission` drops what it finds filled.
    """

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.alone: list[Alone] = []
        self.filling: dict[Request, None] = {}
        self._of = {Status.WAITING: self.waiting, Status.RUNNING: self.running, Status.SWAPPED: self.swapped}

    @property
    def requests(self) -> list[Request]:
        """Return all requests: those that run, those that are swapped out, those that wait."""
        return [*self.running, *self.swapped, *self.waiting]

    def put(self, request: Request) -> None:
        """Put a request, which is in no queue, into the queue that its status names."""
        queue = self._of[request.status]
        place = bisect_right(queue, service_order(request), key=service_order)
        queue.insert(place, request)
        if queue is self.running:
            self.alone.insert(place, _alone(request))
        self.fills(request)

    def fills(self, request: Request) -> None:
        """Note that a request, which may run, has several tokens to compute."""
        if request.status is Status.RUNNING:
            self.filling[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request from its queue."""
        queue = self._of[request.status]
        place = queue.index(request)
        del queue[place]
        if queue is self.running:
            del self.alone[place]
        self.filling.pop(request, None)

    def take_last(self) -> Request:
        """Remove and return the running request that is last in service order."""
        request = self.running.pop()
        self.alone.pop()
        self.filling.pop(request, None)
        return request

    def move(self, request: Request, status: Status) -> None:
        """Give a request another status, and move it to the queue of that status."""
        self.remove(request)
        request.status = status
        self.put(request)

    def next_in_line(self) -> Request | None:
        """Return the swapped or waiting request that enters the batch before all others.

        A swapped request comes before a waiting one that is not strictly more urgent.
        """
        if self.swapped and not (self.waiting and urgency(self.waiting[0]) < urgency(self.swapped[0])):
            return self.swapped[0]
        return self.waiting[0] if self.waiting else None

    def clear(self) -> None:
        """Empty all queues."""
        for queue in self._of.values():
            queue.clear()
        self.alone.clear()
        self.filling.clear()


def _alone(request: Request) -> Alone:
    if len(request.sequences) > 1 or request.asks or not request.is_plain:
        return None
    return request.sequences[0], request.max_total_tokens

"""A scheduler's queues, slots and counts as plain data, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jpaged.scheduling.request import Request
from jpaged.scheduling.scheduler import Scheduler


def scheduler_data(scheduler: Scheduler) -> dict[str, Any]:
    """Return the order of the requests and of the free slots, and the counts; the requests are saved beside it."""
    speculation = scheduler.speculation
    return {
        "requests": [request.request_id for request in scheduler.requests],
        "max_num_seqs": scheduler.max_num_seqs,
        "free_slots": list(scheduler.allocation.free_slots),
        "num_added": scheduler.num_added,
        "num_recomputes": scheduler.preemption.num_recomputes,
        "num_swaps": scheduler.preemption.num_swaps,
        "speculation": None if speculation is None else [type(speculation).__name__, speculation.data()],
    }


def load_scheduler(scheduler: Scheduler, data: Mapping[str, Any], requests: Iterable[Request]) -> None:
    """Bring a fresh scheduler into the state that was saved.

    Args:
        requests: the unfinished ones of those that were saved. Each goes into the queue that its status names; the
            memory has the blocks of those that run or are swapped.
    """
    scheduler.num_added = data["num_added"]
    for request in requests:
        scheduler.restore(request)
    _give_slots(scheduler, data)
    preemption, speculation = scheduler.preemption, scheduler.speculation
    preemption.num_recomputes, preemption.num_swaps = data["num_recomputes"], data["num_swaps"]
    if speculation is not None and data["speculation"] is not None:
        kind, learnt = data["speculation"]
        if kind == type(speculation).__name__:
            speculation.load(learnt)


def _give_slots(scheduler: Scheduler, data: Mapping[str, Any]) -> None:
    """Leave sequences the slots that they had; with another number of slots they get new ones."""
    running = [seq for request in scheduler.running for seq in request.live]
    free = scheduler.allocation.free_slots
    if data["max_num_seqs"] != scheduler.max_num_seqs:
        for seq in running:
            seq.slot = free.pop()
        return
    taken, saved = {seq.slot for seq in running}, data["free_slots"]
    given_up = [slot for slot in free if slot not in taken and slot not in set(saved)]
    free[:] = [slot for slot in saved if slot not in taken] + given_up

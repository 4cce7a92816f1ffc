"""Restores an engine from a saved state: reuses blocks if they mean the same here, else computes them again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.engine.engine import Engine
from jpaged.engine.replica import Replica
from jpaged.engine.saved_state.capture import host_array, pool_array
from jpaged.memory import Lifetime
from jpaged.memory.saving import Fitting, held_blocks, memory_data
from jpaged.outputs import RESTORED
from jpaged.scheduling import Request, Status
from jpaged.scheduling.queues import service_order
from jpaged.scheduling.restart import begin_again
from jpaged.scheduling.saving import load_array, load_request, load_scheduler
from jpaged.text.input_processor import InputProcessor

logger = logging.getLogger(__name__)

Arrays = Callable[[str], np.ndarray]
"""Returns the array that `Capture.arrays` had under a name."""


def check_fresh(engine: Engine) -> None:
    """Refuse an engine that has requests or pins of its own.

    Raises:
        RuntimeError: it has such requests or pins.
    """
    pinned = any(replica.pins.seq_ids for replica in engine.replicas)
    if engine.has_work or engine.requests.awaited or pinned:
        raise RuntimeError("a state is loaded before all else: this engine has requests or pinned prefixes already")


def load(
    engine: Engine, inputs: InputProcessor, host: Mapping[str, Any], arrays: Arrays, *, same_blocks: bool
) -> list[Request]:
    """Restore a fresh engine from a state, and return the state's requests in order of arrival.

    A request that this engine cannot run to its end, as in a pool that is too small, ends with finish_reason "abort"
    and a stop_reason that says why.

    Args:
        host, arrays: the plain data and arrays of a `Capture`.
        same_blocks: whether blocks mean the same here: layer groups, dtype, shards and weights are equal. The pool's
            size may differ.

    Raises:
        RuntimeError: the engine is not fresh.
        ValueError: a request uses something that this version does not know. The engine is then empty.
    """
    check_fresh(engine)
    now = time.monotonic()
    pictures = [{name: load_array(array) for name, array in one.items()} for one in host["pictures"]]
    requests = [load_request(one, now, pictures) for one in host["requests"]]
    for request in requests:
        inputs.look_again(request)
    pins = _short_enough({seq_id: load_request(one, now, pictures) for seq_id, one in host["pins"].items()}, engine)
    try:
        with engine.change():
            parts = {part.request_id: part for request in requests for part in request.all_requests}
            engine.requests.awaited.update({request.request_id: request for request in requests})
            engine.requests.restored.update(engine.requests.awaited)
            for part in parts.values():
                if engine.scheduler.policy != "priority":
                    part.priority = None  # as that of every request here
                _refuse_too_long(part, engine)
                engine.mark_breakpoints(part)
            saved = host["replicas"]
            if same_blocks and len(saved) == len(engine.replicas):
                _go_on(engine, saved, parts, pins, arrays)
            else:
                _compute_again(engine, parts.values(), pins)
            engine.prefixes.take_over(pins, host.get("pin_seconds", {}))  # 0.2.0 saved pins without an end only
        inputs.load(host["inputs"])
        engine.requests.reassign_ids = inputs.reassign_ids
    except BaseException:
        engine.abort(*requests)
        engine.prefixes.forget()
        raise
    return requests


def _go_on(
    engine: Engine,
    saved: Sequence[Mapping[str, Any]],
    parts: Mapping[int, Request],
    pins: Mapping[int, Request],
    arrays: Arrays,
) -> None:
    """Restore the requests, and the blocks for which each replica's pool has room."""
    blocks, contents, host_blocks, swapped = [], [], [], []
    for number, (replica, data) in enumerate(zip(engine.replicas, saved, strict=True)):
        mine = [parts[request_id] for request_id in data["scheduler"]["requests"]]
        pages = _take_over_memory(replica, data, mine, pins)
        going_on = [part for part in mine if part.status is not Status.FINISHED]
        load_scheduler(replica.scheduler, data["scheduler"], going_on)
        for part in going_on:
            _register(engine, replica, part)
            replica.load += len(part.sequences)
        places = [_places(replica, data, pages, group) for group in range(len(data["held"]))]
        blocks.append([[new for _, new in pairs] for pairs in places])
        contents.append(
            [_rows(arrays, pool_array(number, g), [row for row, _ in pairs]) for g, pairs in enumerate(places)]
        )
        rows_of = _swapped_rows(replica, data)
        host_blocks.append(
            [[mine[row] for row in rows] for mine, rows in zip(data["host_blocks"], rows_of, strict=True)]
        )
        swapped.append([_rows(arrays, host_array(number, group), rows) for group, rows in enumerate(rows_of)])
    worker = engine.runner.worker
    if any(some for groups in host_blocks for some in groups):
        worker.host.put(host_blocks, _filled(engine, swapped))
    if any(some for groups in blocks for some in groups):
        worker.pool = worker.blocks.write(worker.pool, blocks, _filled(engine, contents))


def _take_over_memory(
    replica: Replica, data: Mapping[str, Any], mine: Sequence[Request], pins: Mapping[int, Request]
) -> dict[int, int]:
    """Restore a replica's memory as far as it has room, and return the new place of each saved page.

    If room is missing, cached blocks are dropped first, the least recently needed before others, then the newest
    requests, which are computed again.
    """
    scheduler, memory = replica.scheduler, data["memory"]
    fitting, pinned = Fitting(replica.memory, memory), set(memory["pinned"])
    known = set(pins).union(seq.seq_id for part in mine for seq in part.sequences)
    fitting.give_up({*memory["sequences"], *memory["swapped"]} - known)  # of pins that stay no more, and of vectors
    lost = set(pins) & set(data["lost_pins"]) | set(pins) - pinned  # a replica may have unpinned one

    def give_up(part: Request) -> None:
        fitting.give_up(seq.seq_id for seq in part.sequences)
        if part.status is not Status.FINISHED:
            _begin_again(part)

    for part in mine:
        ahead = any(seq.num_computed < seq.num_prompt for seq in part.live)
        if (
            part.status is Status.FINISHED
            or _ends_here(part, replica)
            or (ahead and fitting.keeps_more(part.request_id))
        ):
            give_up(part)
    order = sorted((part for part in mine if part.status is Status.RUNNING), key=service_order)
    while sum(len(part.live) for part in order) > scheduler.max_num_seqs:
        give_up(order.pop())
    swapped = sorted((part for part in mine if part.status is Status.SWAPPED), key=service_order)
    while not fitting.fits_host():
        give_up(swapped.pop())
    while not fitting.fits_pool():
        if order:
            give_up(order.pop())
        else:  # only pins are left
            fitting.give_up(pins)
            lost = set(pins)
    pages = fitting.apply()
    if lost < set(pins) and not replica.memory.is_possible(Lifetime(replica.max_model_len)):
        logger.warning("pinned prefixes leave this pool too little room: they are computed and pinned again")
        for seq_id in set(pins) - lost:
            replica.memory.free(seq_id)
        lost = set(pins)
    replica.pins.seq_ids, replica.pins.lost = set(pins), lost
    return pages


def _swapped_rows(replica: Replica, data: Mapping[str, Any]) -> list[list[int]]:
    """Return the rows of the saved arrays of swapped blocks, by group, that are still needed."""
    owners = replica.memory.swap_space.host.ref_count
    return [
        [row for row, block in enumerate(mine) if counts[block]]
        for mine, counts in zip(data["host_blocks"], owners, strict=True)
    ]


def _places(replica: Replica, data: Mapping[str, Any], pages: Mapping[int, int], group: int) -> list[tuple[int, int]]:
    """Return (row of the saved array, block here) for each block of a group that is still needed."""
    each = replica.memory.layout.groups[group].blocks_per_page
    needed = set(held_blocks(memory_data(replica.memory))[group])
    moved = ((row, pages.get(old // each, -1) * each + old % each) for row, old in enumerate(data["held"][group]))
    return [(row, new) for row, new in moved if new in needed]


def _rows(arrays: Arrays, name: str, rows: list[int]) -> np.ndarray | None:
    return arrays(name)[:, rows] if rows else None


def _filled(engine: Engine, contents: list[list[np.ndarray | None]]) -> list[list[np.ndarray]]:
    """Replace None by an empty array for groups without blocks."""
    spec = engine.runner.spec
    sizes = [plan.block_bytes for plan in spec.layout.groups]
    return [
        [
            np.zeros((spec.shards, 0, size), np.uint8) if rows is None else rows
            for rows, size in zip(groups, sizes, strict=True)
        ]
        for groups in contents
    ]


def _compute_again(engine: Engine, parts: Iterable[Request], pins: Mapping[int, Request]) -> None:
    """Queue all unfinished requests like new ones, in order of arrival, with the tokens that they have."""
    for part in sorted((part for part in parts if part.status is not Status.FINISHED), key=_arrival):
        _begin_again(part)
        replica = min(engine.replicas, key=lambda replica: replica.load)
        if part.status is Status.FINISHED or _ends_here(part, replica):
            continue
        try:
            replica.add(part)
        except ValueError as error:
            _end(part, f"cannot run here: {error}")
        else:
            _register(engine, replica, part)
    for replica in engine.replicas:
        replica.pins.seq_ids, replica.pins.lost = set(pins), set(pins)


def _register(engine: Engine, replica: Replica, part: Request) -> None:
    engine.requests.register(replica, part)
    if part.first_token_time is None:
        engine.watch_breakpoints(replica, part)


def _arrival(request: Request) -> int:
    return request.arrival_number


def _begin_again(part: Request) -> None:
    """Make a request wait with the tokens it has; if these already end it, mark it as finished."""
    begin_again(part)
    if not part.live:
        part.status, part.finished_time = Status.FINISHED, time.monotonic()


def _short_enough(pins: Mapping[int, Request], engine: Engine) -> dict[int, Request]:
    """Return the pinned prefixes that this engine could compute again; log the others, which are not pinned here."""
    found = {}
    for seq_id, request in pins.items():
        if (length := len(request.prompt_token_ids)) <= (most := engine.max_model_len):
            found[seq_id] = request
        else:
            logger.warning("pinned prefix %d of %d tokens is dropped: max_model_len=%d", seq_id, length, most)
    return found


def _refuse_too_long(part: Request, engine: Engine) -> None:
    if part.status is not Status.FINISHED and part.most_computed > engine.max_model_len:
        _end(part, f"may grow to {part.max_total_tokens} tokens, above max_model_len={engine.max_model_len}")


def _ends_here(part: Request, replica: Replica) -> bool:
    """End a request that this engine could not run to its end, and return whether it has finished."""
    scheduler, width = replica.scheduler, len(part.sequences)
    if width > scheduler.max_num_seqs:
        _end(part, f"has {width} outputs, above max_num_seqs={scheduler.max_num_seqs}")
        return True
    try:
        scheduler.admission.check(part, scheduler.admission.lifetime(part))
    except ValueError as error:
        _end(part, f"cannot run here: {error}")
    return part.status is Status.FINISHED


def _end(part: Request, why: str) -> None:
    """End a request; `why` follows `RESTORED` in its stop_reason."""
    reason = RESTORED + why
    logger.warning("request %d ends: %s", part.request_id, reason)
    for seq in part.live:
        seq.finish_reason, seq.stop_reason = "abort", reason
        seq.row, seq.parent = -1, None
    part.status, part.finished_time = Status.FINISHED, time.monotonic()

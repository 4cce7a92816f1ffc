"""Makes compiled loops known to XLA as the targets of custom calls, whose items XLA's own threads share.

Memory and threads. A call allocates one job, a few words: counters of the items that were handed out and that are done,
and its owners. The calling thread and the pool's threads take portions of items by atomic additions. The caller
returns when all items are done; a pool thread that comes late finds none left. The last owner frees the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from numba import types

from pallas_kernels import custom_calls, kept_objects
from pallas_kernels.cpu_objects import all_of, call_key
from pallas_kernels.ffi.call_frame import API, CONTEXT, NUM_THREADS, SCHEDULE, answered, argument, dimension, succeeded
from pallas_kernels.ffi.loops import Loop, add_symbol, cfunc, code_of, njit
from pallas_kernels.ffi.primitives import add, address_of, allocate, free, load, run_range, store

F = TypeVar("F", bound=Callable[..., Any])
RUN = types.void(types.intp, types.intp, types.intp)
"""Signature of what `register` takes."""

# A job: what the threads that share a call know of it. Words of 8 bytes.
_NEXT, _DONE, _OWNERS, _FRAME, _ITEMS, _GRAIN, _RUN = 0, 8, 16, 24, 32, 40, 48
_NEXT_BEFORE, _DONE_BEFORE, _ITEMS_BEFORE, _GRAIN_BEFORE, _BEFORE, _CALL, _JOB_BYTES = 56, 64, 72, 80, 88, 96, 136
_MOST_AXES = 3
"""Most axes whose lengths are a call's items."""


_compiling = threading.RLock()


@njit
def _num_threads(frame, job):
    """Return the number of threads of XLA's pool, 1 where there is none."""
    call = job + _CALL
    store(call + 16, load(frame + CONTEXT))
    store(call + 24, job + _NEXT)
    threads = load(job + _NEXT) if succeeded(load(frame + API), NUM_THREADS, call) else 1
    store(job + _NEXT, 0)
    return threads


@njit
def _release(job):
    if add(job + _OWNERS, -1) == 1:
        free(job)


@njit
def _work(job):
    items, grain, frame = load(job + _ITEMS_BEFORE), load(job + _GRAIN_BEFORE), load(job + _FRAME)
    while items > 0:
        begin = add(job + _NEXT_BEFORE, grain)
        if begin >= items:
            break
        end = min(begin + grain, items)
        run_range(load(job + _BEFORE), frame, begin, end)
        add(job + _DONE_BEFORE, end - begin)
    while items > 0 and add(job + _DONE_BEFORE, 0) < items:
        pass
    items, grain = load(job + _ITEMS), load(job + _GRAIN)
    while True:
        begin = add(job + _NEXT, grain)
        if begin >= items:
            return
        end = min(begin + grain, items)
        run_range(load(job + _RUN), frame, begin, end)
        add(job + _DONE, end - begin)


@cfunc(types.void(types.intp))
def _task(job):
    """Do a pool thread's part of a call; if it comes late, nothing is left to do."""
    _work(job)
    _release(job)


add_symbol("jpaged_ffi_task", _task)


def register(
    name: str,
    run: Loop,
    *,
    items_of: tuple[tuple[int, int], ...],
    portion: int = 1,
    grains: int = 8,
    before: tuple[Loop, int, int] | None = None,
) -> None:
    """Make loops over items the custom call `name`, which `known_again` makes known to XLA.

    A second call for a name does nothing: engines that are made in several threads at once ask for the same targets.

    A call returns when its items are computed. Its job outlives it where a thread of the pool comes late, and is
    freed by the last of its owners.

    Args:
        run: ``cfunc(RUN)`` of a frame and a range of items, which it computes; called on several threads at once.
        items_of: an argument and one of its axes, whose lengths' product, `portion` at a time, are a call's items.
        grains: items are handed out so many times a thread; several even out items of different cost.
        before: a `run`, and an argument and one of its axes, whose length is its number of items; they are computed,
            by the same threads, before the first of the others.
    """
    first, items_argument, items_axis = before or (run, -1, 0)
    add_symbol(f"{name}_run", run)
    add_symbol(f"{name}_before", first)
    axes = [*items_of, *[(-1, 0)] * (_MOST_AXES - len(items_of))]
    places = [number for place in axes for number in place]
    add_symbol(name, _handler, f"{name}_run", f"{name}_before", *places, items_argument, items_axis, portion, grains)


def known_again(function: F) -> F:
    """Compile what a function defines with `register`, keep it on disk and make it known to XLA.

    The function returns the names of the custom calls. It is called once with the same arguments, and never where a
    library or the disk has what it would define, see `pallas_kernels.custom_calls`.
    """
    module, name = function.__module__, function.__qualname__

    @wraps(function)
    def call(*arguments: Any) -> Any:
        if (names := custom_calls.found(module, name, arguments)) is not None:
            return names
        key = call_key(module, name, arguments)
        with _compiling, kept_objects.alone(module, key):  # another thread or process may have compiled it since
            names = custom_calls.found(module, name, arguments)
            if names is None:
                names = function(*arguments)
                code = code_of(all_of(names))
                kept_objects.keep(module, key, names, code)
                kept_objects.load(names, code)
                custom_calls.note(module, name, arguments, names)
        return names

    return cast(F, call)


@cfunc(types.intp(*[types.intp] * 13))
def _handler(frame, run, first, a, a_axis, b, b_axis, c, c_axis, items_argument, items_axis, portion, grains):
    """Share a call's items among threads; `register` binds all arguments but the first."""
    if answered(frame):
        return 0
    items = _length(frame, a, a_axis) * _length(frame, b, b_axis) * _length(frame, c, c_axis)
    items = (items + portion - 1) // portion
    items_before = 0 if items_argument < 0 else _length(frame, items_argument, items_axis)
    job = allocate(_JOB_BYTES)
    threads = max(1, min(_num_threads(frame, job), items))
    store(job + _DONE, 0)
    store(job + _OWNERS, 1)
    store(job + _FRAME, frame)
    store(job + _ITEMS, items)
    store(job + _GRAIN, max(1, items // (threads * grains)))
    store(job + _RUN, run)
    store(job + _NEXT_BEFORE, 0)
    store(job + _DONE_BEFORE, 0)
    store(job + _ITEMS_BEFORE, items_before)
    store(job + _GRAIN_BEFORE, max(1, items_before // (threads * 2)))
    store(job + _BEFORE, first)
    call = job + _CALL
    for _ in range(1, threads):
        add(job + _OWNERS, 1)
        store(call + 16, load(frame + CONTEXT))
        store(call + 24, address_of("jpaged_ffi_task"))
        store(call + 32, job)
        if not succeeded(load(frame + API), SCHEDULE, call):
            _release(job)
    _work(job)
    while add(job + _DONE, 0) < items:
        pass
    _release(job)
    return 0


@njit
def _length(frame, index, axis):
    """Return the length of one axis of an argument; 1 where there is no such argument."""
    return 1 if index < 0 else dimension(argument(frame, index), axis)

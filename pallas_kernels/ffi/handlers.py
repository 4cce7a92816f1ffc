"""Makes compiled loops known to XLA as the targets of custom calls, whose items XLA's own threads share.

Memory and threads. A call allocates one job, a few words: counters of the items that were handed out and that are done,
and its owners. The calling thread and the pool's threads take portions of items by atomic additions. The caller
returns when all items are done; a pool thread that comes late finds none left. The last owner frees the job.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
from llvmlite import binding
from numba import types

from pallas_kernels.ffi.call_frame import API, CONTEXT, NUM_THREADS, SCHEDULE, answered, argument, dimension, succeeded
from pallas_kernels.ffi.helpers import njit
from pallas_kernels.ffi.kept_code import cfunc, named
from pallas_kernels.ffi.primitives import add, address_of, allocate, free, load, run_range, store

RUN = types.void(types.intp, types.intp, types.intp)
"""Signature of what `register` takes."""

# A job: what the threads that share a call know of it. Words of 8 bytes.
_NEXT, _DONE, _OWNERS, _FRAME, _ITEMS, _GRAIN, _RUN = 0, 8, 16, 24, 32, 40, 48
_NEXT_BEFORE, _DONE_BEFORE, _ITEMS_BEFORE, _GRAIN_BEFORE, _BEFORE, _CALL, _JOB_BYTES = 56, 64, 72, 80, 88, 96, 136

_registering = threading.Lock()
_alive: dict[str, tuple[Any, ...]] = {}
"""Compiled functions whose addresses XLA holds, by the target's name."""
_symbols: dict[str, Any] = {}


def add_symbol(name: str, function: Any) -> None:
    """Make a ``cfunc`` known to `pallas_kernels.ffi.primitives.address_of`."""
    _symbols[name] = function
    binding.add_symbol(name, function.address)


def compiled() -> dict[str, Any]:
    """Return each ``cfunc`` of this process by its symbol: handlers, whose symbols are the targets' names, and what
    they find by `add_symbol`."""
    return _symbols | {name: handler for name, (handler, *_) in _alive.items()}


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
    run: Any,
    *,
    items_of: tuple[tuple[int, int], ...],
    portion: int = 1,
    grains: int = 8,
    before: tuple[Any, int, int] | None = None,
) -> None:
    """Make compiled loops known to XLA's CPU backend as the target `name` of a custom call.

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
    for loops in (run, *(before or ())[:1]):
        assert loops.address  # compiled here: others may register what they have meanwhile
    with _registering:
        if name not in _alive:
            handler = _handler(name, run, items_of, portion, grains, before or (run, -1, 0))
            _make_known(name, handler, run, before)


def register_handler(name: str, handler: Any) -> None:
    """Make a compiled handler, a ``cfunc`` of a frame, known to XLA's CPU backend as the target `name`; once."""
    with _registering:
        if name not in _alive:
            _make_known(name, handler)


def _make_known(name: str, handler: Any, *called: Any) -> None:
    _alive[name] = handler, *called
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler.address), platform="cpu")


def _handler(
    name: str,
    run: Any,
    items_of: tuple[tuple[int, int], ...],
    portion: int,
    grains: int,
    before: tuple[Any, int, int],
) -> Any:
    """Compile the function that XLA calls, which finds `run` and its setup by symbols."""
    symbol, symbol_before = f"{name}_run", f"{name}_before"
    first, items_argument, items_axis = before
    add_symbol(symbol, run)
    add_symbol(symbol_before, first)

    def handler(frame):
        if answered(frame):
            return 0
        items = 1
        for index, axis in items_of:
            items *= dimension(argument(frame, index), axis)
        items = (items + portion - 1) // portion
        items_before = 0 if items_argument < 0 else dimension(argument(frame, items_argument), items_axis)
        job = allocate(_JOB_BYTES)
        threads = max(1, min(_num_threads(frame, job), items))
        store(job + _DONE, 0)
        store(job + _OWNERS, 1)
        store(job + _FRAME, frame)
        store(job + _ITEMS, items)
        store(job + _GRAIN, max(1, items // (threads * grains)))
        store(job + _RUN, address_of(symbol))
        store(job + _NEXT_BEFORE, 0)
        store(job + _DONE_BEFORE, 0)
        store(job + _ITEMS_BEFORE, items_before)
        store(job + _GRAIN_BEFORE, max(1, items_before // (threads * 2)))
        store(job + _BEFORE, address_of(symbol_before))
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

    return cfunc(types.intp(types.intp))(named(handler, name))  # kept on disk as it closes over plain values only

"""Makes compiled loops known to XLA as the targets of custom calls, whose items XLA's own threads share.

It also notes which calls this process made known (`registrations`): a process that loads a compiled program and traces
nothing must register the same (`register_again`).

Memory and threads. A call allocates one job, a few words: counters of the items that were handed out and that are done,
and its owners. The calling thread and the pool's threads take portions of items by atomic additions. The caller
returns when all items are done; a pool thread that comes late finds none left. The last owner frees the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import jax
from llvmlite import binding
from numba import types

from pallas_kernels.ffi.call_frame import API, CONTEXT, NUM_THREADS, SCHEDULE, answered, argument, dimension, succeeded
from pallas_kernels.ffi.helpers import njit
from pallas_kernels.ffi.kept_code import cfunc, named
from pallas_kernels.ffi.primitives import add, address_of, allocate, free, load, run_range, store

F = TypeVar("F", bound=Callable[..., Any])
Registration = tuple[str, str, tuple[Any, ...]]
"""Module, function and arguments that register custom calls."""

_PACKAGE = __name__.split(".")[0]
_registrations: dict[Registration, None] = {}


def known_again(function: F) -> F:
    """Note with which arguments a function that registers custom calls was called, see `registrations`; it is called
    once for each of them."""

    @cache
    @wraps(function)
    def call(*arguments: Any) -> Any:
        names = function(*arguments)
        _registrations[function.__module__, function.__qualname__, arguments] = None
        return names

    return cast(F, call)


def registrations() -> list[Registration]:
    """Return what made the custom calls of this process known, for `register_again` in another one."""
    return list(_registrations)


def register_again(made: Iterable[Registration]) -> None:
    """Make custom calls known that a compiled program of another process calls: nothing is traced here.

    Args:
        made: what that process's `registrations` returned. It names code of this package that is run.

    Raises:
        ValueError: it names other code.
    """
    for module, name, arguments in made:
        if module.split(".")[0] != _PACKAGE:
            raise ValueError(f"{module}.{name} is not of {_PACKAGE}: it registers no custom calls")
        getattr(import_module(module), name)(*arguments)


RUN = types.void(types.intp, types.intp, types.intp)
"""Signature of what `register` takes."""

# A job: what the threads that share a call know of it. Words of 8 bytes.
_NEXT, _DONE, _OWNERS, _FRAME, _ITEMS, _GRAIN, _RUN = 0, 8, 16, 24, 32, 40, 48
_NEXT_BEFORE, _DONE_BEFORE, _ITEMS_BEFORE, _GRAIN_BEFORE, _BEFORE, _CALL, _JOB_BYTES = 56, 64, 72, 80, 88, 96, 136

_registering = threading.Lock()
_alive: dict[str, tuple[Any, ...]] = {}
"""Compiled functions whose addresses XLA holds, by the target's name."""


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


binding.add_symbol("jpaged_ffi_task", _task.address)


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
    binding.add_symbol(symbol, run.address)
    binding.add_symbol(symbol_before, first.address)

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

"""A custom call that a thread of XLA's pool ends, which then goes on with the program; compiled by Numba."""

from __future__ import annotations

from numba import types

from pallas_kernels import ffi
from pallas_kernels.ffi.call_frame import (
    API,
    CALL_BYTES,
    CONTEXT,
    FUTURE,
    FUTURE_CREATE,
    FUTURE_SET_AVAILABLE,
    SCHEDULE,
    answered,
    succeeded,
)
from pallas_kernels.ffi.primitives import address_of, allocate, free, load, store

# A job: what a function of XLA's is called with, then the call's future and where these functions are.
_FUTURE, _API, _JOB_BYTES = CALL_BYTES, CALL_BYTES + 8, CALL_BYTES + 16


@ffi.cfunc(types.void(types.intp))
def _end(job):
    """End the call: what waited for it, the rest of the program, runs here and now."""
    store(job + 16, load(job + _FUTURE))
    succeeded(load(job + _API), FUTURE_SET_AVAILABLE, job)
    free(job)


ffi.add_symbol("jpaged_thread_pool_end", _end)


@ffi.cfunc(types.intp(types.intp))
def _move(frame):
    """Leave the call open until a thread of the pool ends it; without one it is over at once."""
    if answered(frame):
        return 0
    job, api = allocate(_JOB_BYTES), load(frame + API)
    if not succeeded(api, FUTURE_CREATE, job):
        free(job)
        return 0
    future = load(job + 16)
    store(frame + FUTURE, future)
    store(job + _FUTURE, future)
    store(job + _API, api)
    store(job + 16, load(frame + CONTEXT))
    store(job + 24, address_of("jpaged_thread_pool_end"))
    store(job + 32, job)
    if not succeeded(api, SCHEDULE, job):
        store(job + 16, future)
        succeeded(api, FUTURE_SET_AVAILABLE, job)
        free(job)
    return 0


@ffi.known_again
def thread_pool_target() -> str:
    """Return the name of the custom call ``x -> x``, whose result takes the place of its argument."""
    name = "jpaged_thread_pool"
    ffi.add_symbol(name, _move)
    return name

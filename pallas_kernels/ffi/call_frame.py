"""Reads the ``XLA_FFI_CallFrame`` that XLA passes to a custom call, in loops that Numba compiles.

The offsets are those of ``xla/ffi/api/c_api.h`` on a 64-bit machine; its structures only ever grow at their ends.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import call_with, load, pointer, store

# XLA_FFI_CallFrame.
_EXTENSION, API, CONTEXT, _NUM_ARGUMENTS, _ARGUMENTS, _RESULTS, FUTURE = 8, 16, 24, 56, 72, 112, 168
# XLA_FFI_Extension_Base and XLA_FFI_Metadata_Extension: XLA asks for the version a handler was built against.
_EXTENSION_TYPE, _METADATA, _METADATA_TYPE = 8, 24, 1
_MAJOR, _MINOR, _TRAITS, _API_VERSION = 24, 28, 32, (0, 1)
# XLA_FFI_Buffer.
_DATA, _RANK, _DIMENSIONS = 24, 32, 40
# XLA_FFI_Api: its functions.
_ERROR_DESTROY, SCHEDULE, NUM_THREADS, FUTURE_CREATE, FUTURE_SET_AVAILABLE = 64, 136, 144, 152, 160
# What those functions are called with: a size, an extension, and three words of a function's own at most.
CALL_BYTES = 40


@njit
def _int32(address):
    return carray(pointer(address), (1,), np.int32)


@njit
def answered(frame):
    """Tell whether the call only queries the handler's version; if so, answer it."""
    extension = load(frame + _EXTENSION)
    if extension == 0 or _int32(extension + _EXTENSION_TYPE)[0] != _METADATA_TYPE:
        return False
    metadata = load(extension + _METADATA)
    _int32(metadata + _MAJOR)[0] = _API_VERSION[0]
    _int32(metadata + _MINOR)[0] = _API_VERSION[1]
    _int32(metadata + _TRAITS)[0] = 0
    return True


@njit
def argument(frame, index):
    """Return the address of an argument's ``XLA_FFI_Buffer``."""
    return load(load(frame + _ARGUMENTS) + 8 * index)


@njit
def arguments(frame):
    """Return how many arguments there are."""
    return load(frame + _NUM_ARGUMENTS)


@njit
def result(frame, index):
    """Return the address of a result's ``XLA_FFI_Buffer``."""
    return load(load(frame + _RESULTS) + 8 * index)


@njit
def dimension(buffer, axis):
    """Return the length of one axis of a buffer."""
    return load(load(buffer + _DIMENSIONS) + 8 * axis)


@njit
def elements(buffer):
    """Return the number of a buffer's elements."""
    number = 1
    for axis in range(load(buffer + _RANK)):
        number *= dimension(buffer, axis)
    return number


@njit
def address(buffer):
    """Return where a buffer's elements are."""
    return load(buffer + _DATA)


@njit
def data(buffer):
    """Return the address of a buffer's elements in the form that `numba.carray` takes."""
    return pointer(address(buffer))


@njit
def succeeded(api, function, call):
    """Call a function of ``XLA_FFI_Api`` with the structure at `call`, whose first two words are filled in here."""
    store(call, CALL_BYTES)
    store(call + 8, 0)
    error = call_with(load(api + function), call)
    if error == 0:
        return True
    store(call, 24)
    store(call + 16, error)
    call_with(load(api + _ERROR_DESTROY), call)
    return False

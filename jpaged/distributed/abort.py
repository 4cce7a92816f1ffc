"""Holds up the end that jax's coordination client gives its process when the coordinator is gone."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from typing import Any

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


class AbortHold:
    """Calls a function in the thread that calls C's ``abort()``, before the process ends by it.

    The client's own thread aborts as soon as its connection breaks, which may be before Python raised the error with
    the name of the process that is lost. Python's handlers of signals run in the main thread, too late for that, so
    this one is C's; the thread that aborts waits in it for the function's return.

    Args:
        before: called for each abort; the process ends when it returns.
    """

    def __init__(self, before: Callable[[], Any]) -> None:
        libc = ctypes.CDLL(None)
        libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]

        def aborting(_: int) -> None:
            libc.signal(signal.SIGABRT, self._previous)
            before()

        self._handler = _Handler(aborting)  # C has its address: it lives as long as the process
        self._previous = libc.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

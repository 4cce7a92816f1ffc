"""Defers SIGINT, SIGTERM and SIGALRM until a change of the engine's state is complete."""

from __future__ import annotations

import _signal  # wrapped by `signal`, which makes enums of handlers and takes ten times as long
import signal
import threading
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGALRM")
"""Signals whose handlers commonly raise: Ctrl-C, the end of the process, and time limits."""


class SignalHold:
    """Holds signals off within a ``with`` block; blocks may be nested.

    Python runs signal handlers between two bytecodes of the main thread, so elsewhere there is nothing to hold off.
    """

    def __init__(self) -> None:
        self._signals = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
        self._depth = 0
        self._handlers: dict[int, Any] = {}
        self._came: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            self._depth += 1
            if self._depth == 1:
                self._take_over()
        except BaseException:  # raised by a handler that was not replaced yet
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            self._let_go()

    def _take_over(self) -> None:
        for number in self._signals:
            handler = _signal.getsignal(number)
            if callable(handler) and handler != self._note:
                self._handlers[number] = handler
                _signal.signal(number, self._note)

    def _let_go(self) -> None:
        handlers = dict(reversed(self._handlers.items()))
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        self._handlers = {}
        came, self._came = self._came, {}
        for number, frame in came.items():
            handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came[number] = frame


signals_held = SignalHold()
"""The process's only hold, as there is only one main thread."""

"""Calls what recurses deeply in native code, where a stack that ends would end the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 64 << 20
"""Stack of the thread that calls; only what is used of it takes memory."""
_SIZE = threading.Lock()
"""Held while the size of all new threads' stacks is another one."""

T = TypeVar("T")


def with_deep_stack(call: Callable[[], T]) -> T:
    """Return what `call` returns, in a thread of its own with a stack of `STACK_BYTES`; what it raises is raised."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=run, name="jpaged-deep-stack", daemon=True)
    with _SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return found.result()

"""Compiles shapes in threads: all at once, or one after another behind an engine that serves."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from jpaged.execution.model_programs import Compile
from jpaged.execution.shapes import Shape

NICENESS = 10
"""How far a compilation in the background steps back: beside threads that compute all the time it gets a tenth of what
one of them gets."""


def compiled_in_threads(shapes: Iterable[Shape]) -> Iterator[str]:
    """Compile shapes, one an iteration, and yield their names: they are traced here, and compiled in threads."""
    with ThreadPoolExecutor(2) as threads:
        pending = deque[tuple[str, Future[None]]]()
        for shape in shapes:
            pending.append((shape.name, threads.submit(shape.trace())))
            while len(pending) > 4 or (pending and pending[0][1].done()):
                yield _finished(*pending.popleft())
        while pending:
            yield _finished(*pending.popleft())


def compile_at_low_priority(compile_it: Compile) -> None:
    """Compile what was traced, in a thread that Linux runs where others leave it time; waits for the end.

    Tracing is not done there: it holds the interpreter, which a step would wait for all the longer.
    """
    errors: list[BaseException] = []

    def run() -> None:
        if sys.platform == "linux":  # elsewhere it would be the niceness of the whole process
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            compile_it()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="jpaged-compiler")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _finished(name: str, compiling: Future[None]) -> str:
    compiling.result()
    return name

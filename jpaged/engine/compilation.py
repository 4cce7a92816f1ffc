"""Compiles shapes in a thread while the engine serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from jpaged.execution.compile.program import Compilations
from jpaged.execution.shapes import Shape, compile_at_low_priority

logger = logging.getLogger(__name__)


class BackgroundCompiler:
    """Compiles shapes one after another in a thread, which ends by `stop`, when all are compiled, or with the program.

    A step that needs a shape which is being compiled waits for it, and the thread leaves out what a step compiled. A
    shape that cannot be compiled is logged, and left to the step that finds no larger one.

    Args:
        shapes: what to compile, in this order.
        compilations: counts them.
        is_busy: whether requests run. Then the thread rests after each shape as long as tracing it took: that
            holds the interpreter, which steps need too.

    Attributes:
        stopping: is set once `stop` was called.
    """

    def __init__(self, shapes: Sequence[Shape], compilations: Compilations, is_busy: Callable[[], bool]) -> None:
        self._shapes = shapes
        self._compilations = compilations
        self._is_busy = is_busy
        self.stopping = threading.Event()
        # No daemon: the interpreter waits for it to come out of the compiler, which would crash.
        self._thread = threading.Thread(target=self._run, name="jpaged-background")

    def start(self) -> None:
        """Begin to compile."""
        self._compilations.num_to_come = len(self._shapes)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Tell whether shapes are being compiled."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread, once the shape that is being compiled is, and wait for that; calling it twice is harmless."""
        self.stopping.set()
        if self._thread is not threading.current_thread():  # the garbage collector may close an engine anywhere
            self._thread.join()

    def wait(self, timeout: float) -> None:
        """Wait until the thread has ended, for so many seconds at most."""
        self._thread.join(timeout)

    @property
    def _is_ending(self) -> bool:
        return self.stopping.is_set() or not threading.main_thread().is_alive()

    def _run(self) -> None:
        self._compilations.background = threading.get_ident()
        start, failed, before = time.monotonic(), 0, self._compilations.num_in_background
        try:
            for shape in self._shapes:
                if self._is_ending:
                    break
                done = self._compile(shape)
                if not done and self._is_ending:
                    break
                failed += not done
                self._compilations.num_to_come -= 1
        finally:
            self._compilations.background = None
        left, number = self._compilations.num_to_come, self._compilations.num_in_background - before
        self._compilations.num_to_come = 0
        self._compilations.warm |= not (left or failed)
        seconds = time.monotonic() - start
        logger.info("compiled %d shapes in the background in %.1f s; %d failed, %d left", number, seconds, failed, left)

    def _compile(self, shape: Shape) -> bool:
        """Compile a shape; tells whether it is compiled."""
        start = time.perf_counter()
        try:
            compile_it = shape.trace()
            tracing = time.perf_counter() - start
            if self._is_ending:
                return False
            compile_at_low_priority(compile_it)
        except Exception:
            if not self._is_ending:
                logger.exception("the %s cannot be compiled in the background; steps take a larger one", shape.name)
            return False
        if self._is_busy():
            self.stopping.wait(tracing)
        return True

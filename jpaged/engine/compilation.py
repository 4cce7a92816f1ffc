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
    """Compiles shapes one after another in a thread.

    The thread ends when `stop` is called, when all shapes are compiled, or when the main thread ends. A step that needs
    the shape being compiled waits for it, and the thread skips shapes that a step has compiled. A shape that cannot be
    compiled is logged; a step that finds no larger shape then compiles it itself.

    Args:
        shapes: the shapes to compile, in this order.
        compilations: counts the compiled shapes.
        is_busy: whether requests run. If so, the thread rests after each shape for as long as tracing it took: tracing
            holds the interpreter, which steps need too.

    Attributes:
        stopping: set once `stop` was called.
    """

    def __init__(self, shapes: Sequence[Shape], compilations: Compilations, is_busy: Callable[[], bool]) -> None:
        self._shapes = shapes
        self._compilations = compilations
        self._is_busy = is_busy
        self.stopping = threading.Event()
        # No daemon: the interpreter must wait until the thread has left the compiler, else it crashes.
        self._thread = threading.Thread(target=self._run, name="jpaged-background")

    def start(self) -> None:
        """Start the thread."""
        self._compilations.num_to_come = len(self._shapes)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Tell whether shapes are being compiled."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread after the shape that it is compiling, and wait for it; calling it twice is harmless."""
        self.stopping.set()
        if self._thread is not threading.current_thread():  # the garbage collector may close an engine in any thread
            self._thread.join()

    def wait(self, timeout: float) -> None:
        """Wait until the thread has ended, for at most `timeout` seconds."""
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
        """Compile a shape and return whether it was compiled."""
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

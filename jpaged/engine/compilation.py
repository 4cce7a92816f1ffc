"""Compiles shapes in a thread while the engine serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from jpaged.execution.compile.program import Compilations
from jpaged.execution.shapes import Shape, compile_at_low_priority

logger = logging.getLogger(__name__)

REST = 1.0
"""Rest after a shape while requests run, in times of what compiling it took: half of the time is left to steps."""
LONGEST_REST = 5.0
"""Most seconds of a rest: where a shape takes longer, the compiler itself waits for processors that others use."""


class BackgroundCompiler:
    """Compiles shapes one after another in a thread.

    The thread ends when `stop` is called, when all shapes are compiled, or when the main thread ends. A step that needs
    the shape being compiled waits for it, and the thread skips shapes that a step has compiled. A shape that cannot be
    compiled is logged; a step that finds no larger shape then compiles it itself.

    While requests run, the thread rests after each shape for `REST` times as long as that took, or `LONGEST_REST`
    seconds. Priorities alone would not do: tracing holds the interpreter, which steps need too, and not every system
    has priorities of threads.

    Args:
        shapes: the shapes to compile, in this order, but first those that most steps lack.
        compilations: counts the compiled shapes.
        is_busy: whether requests run.
        lowered: lowers the compiler's priority while the thread runs, see `CompilerThreads.lowered`.
        clock: a monotonic clock, in seconds.

    Attributes:
        lowered: as given.
        stopping: set once `stop` was called.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        compilations: Compilations,
        is_busy: Callable[[], bool],
        lowered: Callable[[], AbstractContextManager[None]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shapes = list(shapes)
        self._compilations = compilations
        self._is_busy = is_busy
        self.lowered = lowered
        self._clock = clock
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
        counts = self._compilations
        counts.background = threading.get_ident()
        start, before, failed = self._clock(), counts.num_in_background, 0
        left = self._shapes
        logger.info("%d shapes are compiled in the background; until then steps are padded to larger ones", len(left))
        try:
            with self.lowered():
                failed = self._compile_all(left)
        finally:
            counts.background = None
        counts.num_to_come = 0
        counts.warm |= not (left or failed)
        logger.info(
            "compiled %d shapes in the background in %.1f s; %d failed, %d left; %d steps and draws were padded",
            counts.num_in_background - before,
            self._clock() - start,
            failed,
            len(left),
            counts.num_padded,
        )

    def _compile_all(self, left: list[Shape]) -> int:
        """Compile shapes, take each from the list, and return how many could not be compiled."""
        failed, counts = 0, self._compilations
        while left and not self._is_ending:
            shape = max(left, key=lambda shape: counts.lacking[shape.name])  # the first of several
            began = self._clock()
            done = self._compile(shape)
            if not done and self._is_ending:
                break
            failed += not done
            left.remove(shape)
            counts.num_to_come -= 1
            counts.lacking.pop(shape.name, None)
            if left:
                self._rest(min(REST * (self._clock() - began), LONGEST_REST))
        return failed

    def _compile(self, shape: Shape) -> bool:
        """Compile a shape and return whether it was compiled."""
        try:
            compile_it = shape.trace()
            if self._is_ending:
                return False
            compile_at_low_priority(compile_it)
        except Exception:
            if not self._is_ending:
                logger.exception("the %s cannot be compiled in the background; steps take a larger one", shape.name)
            return False
        return True

    def _rest(self, seconds: float) -> None:
        """Leave the processor to steps while requests run, for at most so long."""
        end = self._clock() + seconds
        while self._is_busy() and not self._is_ending and (left := end - self._clock()) > 0:
            self.stopping.wait(min(left, 0.1))

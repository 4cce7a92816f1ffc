"""Tells what a worker has compiled, how long it took, and whether it is compiling now."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Hashable

logger = logging.getLogger(__name__)


class Compilations:
    """Counts and times compilations: it is told when each begins and when it ends. Safe in threads.

    Attributes:
        warm: from now on a compilation counts as a recompile.
        num_recompiles: shapes compiled since; each is logged as a warning.
        seconds: time that tracing and compiling took, added up over shapes.
        background: the thread that compiles in the background, see `threading.get_ident`; None = none does.
        num_in_background: shapes that it compiled, or began to.
        num_to_come: shapes that it will look at yet.
    """

    def __init__(self) -> None:
        self.warm = False
        self.num_recompiles = 0
        self.seconds = 0.0
        self.background: int | None = None
        self.num_in_background = 0
        self.num_to_come = 0
        self._shapes: set[Hashable] = set()
        self._running: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Return how many shapes were compiled so far, those that are being compiled included."""
        return len(self._shapes)

    @property
    def running(self) -> bool:
        """Tell whether a shape is being compiled right now."""
        return bool(self._running)

    def begin(self, shape: Hashable) -> None:
        """Note that a shape is about to be traced and compiled."""
        with self._lock:
            self._shapes.add(shape)
            self._running[shape] += 1
            self.num_recompiles += self.warm
            self.num_in_background += threading.get_ident() == self.background
        if self.warm:
            logger.warning("compiling %s after warm-up (number %d)", shape, self.num_recompiles)

    def end(self, shape: Hashable, seconds: float) -> None:
        """Note that a shape is compiled, or could not be, after `seconds` of tracing and compiling."""
        with self._lock:
            self.seconds += seconds
            self._running -= Counter([shape])
        logger.debug("compiled %s in %.2f s", shape, seconds)

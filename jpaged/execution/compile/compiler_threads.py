"""Finds the threads in which XLA compiles, and lowers their priority while steps run.

XLA compiles in pools that it makes once and that run no steps. The priority of the thread that asks for a program does
not reach them. At the priority of steps they take half of the time of two cores from them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

NICENESS = 10
"""Niceness of compilations in the background: next to a busy thread, one gets a tenth of a core."""
LEAST_SECONDS = 0.05
"""Processor seconds by which a thread is known to compile; others of XLA wake up now and then."""
STEPS = "tf_XLAEigen"
"""Name of the threads that share a step's work."""


def seconds_of_threads(tasks: Path = Path("/proc/self/task")) -> dict[int, float]:
    """Return the processor seconds of this process's native threads by id, but of those that run steps; of none where
    the system does not say.

    Args:
        tasks: the folder that has a folder for each thread.
    """
    found: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for task in tasks.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                start, _, rest = (task / "stat").read_text().rpartition(")")
                if not start.endswith(STEPS):
                    user, system = rest.split()[11:13]
                    found[int(task.name)] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


def set_niceness(thread: int, niceness: int) -> None:
    """Set the niceness of a native thread (Linux); less than it has takes a privilege."""
    if sys.platform == "linux":  # elsewhere it would be the niceness of the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


class CompilerThreads:
    """Knows the threads in which XLA compiles, by the processor time that they take while no step runs.

    Args:
        seconds: see `seconds_of_threads`.
        set_niceness: see there.

    Attributes:
        ids: the threads found so far.
    """

    def __init__(
        self,
        seconds: Callable[[], Mapping[int, float]] = seconds_of_threads,
        set_niceness: Callable[[int, int], None] = set_niceness,
    ) -> None:
        self.ids: set[int] = set()
        self._seconds = seconds
        self._set_niceness = set_niceness

    @contextlib.contextmanager
    def found(self) -> Iterator[None]:
        """Find the threads that compile: no step may run while this lasts. Threads of Python are not among them."""
        before = self._seconds()
        yield
        python = {thread.native_id for thread in threading.enumerate()}
        used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in self._seconds().items()}
        self.ids |= {thread for thread, seconds in used.items() if seconds >= LEAST_SECONDS} - python

    @contextlib.contextmanager
    def lowered(self) -> Iterator[None]:
        """Give the threads a low priority while this lasts; without the privilege to raise it they keep it."""
        before = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0
        self._set_all(max(NICENESS, before))
        try:
            yield
        finally:
            self._set_all(before)

    def _set_all(self, niceness: int) -> None:
        for thread in self.ids:
            self._set_niceness(thread, niceness)

"""Ends a run that has lost a process."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from typing import Any

import jax

from jpaged.distributed.abort import AbortHold
from jpaged.errors import ProcessLost

logger = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""Seconds between the loss of a process and the end of this one, in which a program may save something."""

NEWS_SECONDS = 5.0
"""Seconds that a failed device call waits for news of a process that died: the devices may hear of it first."""


class Watch:
    """Watches whether a process of the run is lost.

    A collective that waits for a dead process never returns, and nothing can call it off. So the main thread
    of this process gets `ProcessLost`, and if that cannot reach it, the process ends with status 1 after
    `GRACE_SECONDS`.
    """

    def __init__(self) -> None:
        self._loss: Future[None] = Future()
        self._lock = threading.Lock()
        self._wanted: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._hold = AbortHold(self._tell_before_the_end)
        atexit.register(self._leave)  # runs before jax's own, which would wait for the dead
        threading.Thread(target=self._wait_for_devices, name="jpaged-fetch", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Tell whether `lose` was called."""
        return self._loss.done()

    def lose(self, message: str) -> None:
        """End the run; the first message counts."""
        with self._lock:
            if self._loss.done():
                return
            logger.critical("%s; this process ends in %.0f seconds at most", message, GRACE_SECONDS)
            timer = threading.Timer(GRACE_SECONDS, self._leave)
            timer.name, timer.daemon = "jpaged-leave", True
            timer.start()
            self._loss.set_exception(ProcessLost(message))

    def check(self) -> None:
        """Raise `ProcessLost` if `lose` was called."""
        if self._loss.done():
            self._loss.result()

    def fetch(self, arrays: Any) -> Any:
        """Fetch arrays as `jax.device_get` does, but end when a process is lost.

        Raises:
            ProcessLost: a process was lost, whatever the devices say of it.
        """
        fetched: Future[Any] = Future()
        self._wanted.put((lambda: jax.device_get(arrays), fetched))
        wait((fetched, self._loss), return_when=FIRST_COMPLETED)
        if not self.lost and fetched.exception() is not None:
            self.wait_for_news()
        self.check()
        return fetched.result()

    def wait_for_news(self) -> None:
        """Raise `ProcessLost` if the loss of a process explains a failure that has just happened."""
        wait((self._loss,), timeout=NEWS_SECONDS)
        self.check()

    def _tell_before_the_end(self) -> None:
        """Give this process, which a library aborts, the time to end with the loss that explains it."""
        wait((self._loss,), timeout=NEWS_SECONDS)
        if self.lost:
            time.sleep(2 * GRACE_SECONDS)  # it is ended in the meantime

    def _wait_for_devices(self) -> None:
        while True:
            function, future = self._wanted.get()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _leave(self) -> None:
        if not self.lost:
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

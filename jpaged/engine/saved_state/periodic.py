"""Saves an engine's state again and again, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from jpaged.errors import EngineStopped
from jpaged.outputs import SavedState

logger = logging.getLogger("jpaged.engine")


class PeriodicSaver:
    """Saves every so many seconds, where something has changed since the last time, until it is stopped.

    A save that fails is told in the log, and the next one tries again.

    Args:
        save: saves the state.
        moment: returns something that differs once the engine has done anything.
        seconds: from the end of one save to the beginning of the next.

    Attributes:
        last: what the last save took; None before the first.
    """

    def __init__(self, save: Callable[[], SavedState], moment: Callable[[], Any], seconds: float) -> None:
        self.last: SavedState | None = None
        self._save = save
        self._moment = moment
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jpaged-saver", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Save no more; a save that is being written is waited for."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        saved: Any = None
        while not self._stopped.wait(self._seconds):
            moment = self._moment()
            if moment == saved:
                continue
            try:
                self.last = self._save()
                saved = moment
            except EngineStopped:
                return
            except Exception:
                logger.exception("the state could not be saved; the next save tries again")

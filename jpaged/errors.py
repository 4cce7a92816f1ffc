"""Errors that are about the engine's state, not about what it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EngineBusy(RuntimeError):
    """Too many requests wait already; try again later."""


class EngineStopped(RuntimeError):
    """The engine was shut down or failed; its cause is the exception that ended it."""


class StateRefused(ValueError):
    """A saved state is damaged, or of another model or version; the engine that was to go on from it is as it was."""


class ProcessLost(RuntimeError):
    """A process of a run over several hosts is gone, and the run with it."""


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a call of `LLM.generate`, `chat` or `beam_search`, whose text so far is kept here.

    Attributes:
        outputs: a `RequestOutput` for each prompt; those that had not ended have the finish_reason "abort".
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        super().__init__()
        self.outputs = list(outputs)

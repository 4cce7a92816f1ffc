"""Errors that are about the engine's state, not about what it was asked."""


class EngineBusy(RuntimeError):
    """Too many requests wait already; try again later."""


class EngineStopped(RuntimeError):
    """The engine was shut down or failed; its cause is the exception that ended it."""


class StateRefused(ValueError):
    """A saved state is damaged, or of another model or version; the engine that was to go on from it is as it was."""


class ProcessLost(RuntimeError):
    """A process of a run over several hosts is gone, and the run with it."""

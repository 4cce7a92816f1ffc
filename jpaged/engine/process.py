"""Refuses to use an engine in a forked process, and to pickle it."""

from __future__ import annotations

import os
from typing import NoReturn


def check_process(loaded_in: int) -> None:
    """Raise in a fork of the process that loaded an engine: without the device's threads, the fork would hang.

    Args:
        loaded_in: id of the process that loaded the engine.

    Raises:
        RuntimeError: this is another process.
    """
    if os.getpid() != loaded_in:
        raise RuntimeError(
            f"this LLM was loaded in process {loaded_in} and cannot be used in process {os.getpid()}, forked from it: "
            "call LLM(...) in the new process, which multiprocessing must start by 'spawn', not 'fork'"
        )


def refuse_pickling(instance: object) -> NoReturn:
    """Raise an error that says what to do instead of pickling or copying an engine.

    Raises:
        TypeError: always.
    """
    name = type(instance).__name__
    raise TypeError(
        f"{name} cannot be pickled or copied, as it holds device memory and compiled programs: "
        f"pass the model's name and settings, and call {name}(...) where it is needed"
    )

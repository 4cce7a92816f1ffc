"""Marks the methods of a worker that all processes of an engine make together, in one order."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Announcing(Protocol):
    """What has device calls."""

    announce: Callable[[str, tuple[Any, ...]], None]
    """Told the name and arguments of every device call before it is made."""
    failed: Callable[[BaseException], None]
    """Told what a device call raised, which others may have made."""


W = TypeVar("W", bound=Announcing)

DEVICE_CALLS: set[str] = set()
"""Names of the methods that `device_call` marks."""


def device_call(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Mark a method that a worker is told step by step, by position: `announce` hears of each call first, and
    `failed` of each that raises."""

    @wraps(method)
    def call(self: W, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs
        self.announce(method.__name__, args)
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self.failed(error)
            raise

    DEVICE_CALLS.add(method.__name__)
    return call


def tell_nobody(name: str, args: tuple[Any, ...]) -> None:
    """Do nothing: one process holds the whole mesh."""


def blame_nobody(error: BaseException) -> None:
    """Do nothing: no other process has made the call that raised."""

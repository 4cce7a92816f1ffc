"""Says that a public name goes away: since when, when, and what to use instead.

A name stays for at least one minor version after the one that deprecates it. `overdue` lists those that should be gone,
and a test keeps that list empty.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Deprecation:
    """Describes a name that goes away.

    Attributes:
        name: what users write, such as ``LLM.old``.
        use: what they write instead.
        since: version that warns first, such as ``0.3``.
        removed: version that has it no more.
    """

    name: str
    use: str
    since: str
    removed: str

    def __post_init__(self) -> None:
        since, removed = version_of(self.since), version_of(self.removed)
        if removed[:2] <= since[:2]:
            raise ValueError(
                f"removed={self.removed!r} of {self.name} must be a later minor version than since={self.since!r}"
            )

    def warn(self, stacklevel: int = 1) -> None:
        """Warn at the caller's line, or `stacklevel` - 1 frames above it."""
        warnings.warn(
            f"{self.name} is deprecated since jpaged {self.since} and will be removed in {self.removed}: use "
            f"{self.use}",
            DeprecationWarning,
            stacklevel=stacklevel + 1,
        )


_KNOWN: list[Deprecation] = []


def deprecated(name: str, *, use: str, since: str, removed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a function or method that warns at each call, at the caller's line.

    Raises:
        ValueError: a version is not one, or `removed` is not a later minor version than `since`.
    """
    notice = Deprecation(name, use, since, removed)
    _KNOWN.append(notice)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def warned(*args: P.args, **kwargs: P.kwargs) -> R:
            notice.warn(stacklevel=2)
            return function(*args, **kwargs)

        return warned

    return decorate


def overdue(version: str) -> list[Deprecation]:
    """Return what was to be gone by `version` and is still there, of the modules that are imported."""
    return [notice for notice in _KNOWN if version_of(notice.removed) <= version_of(version)]


def version_of(text: str) -> tuple[int, ...]:
    """Return a version as three numbers; what is missing is 0.

    Raises:
        ValueError: it is not one to three numbers with dots between them.
    """
    parts = text.split(".")
    if len(parts) > 3 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"version {text!r} is not one to three numbers with dots between them, such as 0.3")
    return tuple(int(part) for part in [*parts, "0", "0"][:3])

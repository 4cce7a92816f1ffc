"""Notes which custom calls this process made known to XLA, for one that traces nothing to do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
Registration = tuple[str, str, tuple[Any, ...]]
"""Module, function and arguments that register custom calls."""

_PACKAGE = __name__.split(".")[0]
_registrations: dict[Registration, None] = {}


def known_again(function: F) -> F:
    """Note with which arguments a function that registers custom calls was called, see `registrations`; it is called
    once for each of them."""

    @cache
    @wraps(function)
    def call(*arguments: Any) -> Any:
        names = function(*arguments)
        _registrations[function.__module__, function.__qualname__, arguments] = None
        return names

    return cast(F, call)


def registrations() -> list[Registration]:
    """Return what made the custom calls of this process known, for `register_again` in another one."""
    return list(_registrations)


def register_again(made: Iterable[Registration]) -> None:
    """Make custom calls known that a compiled program of another process calls: nothing is traced here.

    Args:
        made: what that process's `registrations` returned. It names code of this package that is run.

    Raises:
        ValueError: it names other code.
    """
    for module, name, arguments in made:
        if module.split(".")[0] != _PACKAGE:
            raise ValueError(f"{module}.{name} is not of {_PACKAGE}: it registers no custom calls")
        getattr(import_module(module), name)(*arguments)

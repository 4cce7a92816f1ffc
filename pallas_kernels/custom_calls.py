"""Names the custom calls that CPU kernels make, and makes them known to XLA: from a library that was compiled ahead, or
else by Numba.

A kernel asks for its call by the name of the function that registers it, ``target("row_ops.cpu_kernel:norm_target")``.
So no module that needs Numba is imported where a library (`cpu_objects`) has the call. Which calls this process made
known is noted (`registrations`): a process that loads a compiled program and traces nothing must register the same
(`register_again`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from pallas_kernels import cpu_features, cpu_objects
from pallas_kernels.cpu_objects import PACKAGE

F = TypeVar("F", bound=Callable[..., Any])
Registration = tuple[str, str, tuple[Any, ...]]
"""Module, function and arguments that register custom calls."""

_registrations: dict[Registration, None] = {}


def target(function: str, *arguments: Any) -> Any:
    """Make the custom calls known that a function registers, and return what it returns: their names.

    Args:
        function: a module of this package and a function in it that `known_again` decorates, ``module:function``.
        arguments: its arguments.

    Raises:
        ValueError: the call needs AMX, which Linux does not let this process use.
        ImportError: no library on this machine has the calls, and Numba, which would compile them, is not installed.
    """
    module, _, name = function.partition(":")
    return _target(f"{PACKAGE}.{module}", name, arguments)


def _check(arguments: tuple[Any, ...]) -> None:
    """Raise ValueError where a call needs AMX and has no permission: a program may come from another process, and the
    permission with none."""
    if "amx" in arguments and not cpu_features.has_bfloat16_tiles():
        raise ValueError("kind='amx' needs a processor with AMX that Linux lets this process use")


def _target(module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    _check(arguments)
    key = cpu_objects.call_key(module, name, arguments)
    if (names := cpu_objects.registered(key)) is not None:
        _registrations[module, name, arguments] = None
        return names
    if find_spec("numba") is None:
        raise ImportError(f"no loops were compiled ahead for {key}, and Numba is not installed: pip install numba")
    return getattr(import_module(module), name)(*arguments)


def known_again(function: F) -> F:
    """Note with which arguments a function that registers custom calls was called, see `registrations`; it is called
    once for each of them, and never where a library has what it would register."""

    @cache
    @wraps(function)
    def call(*arguments: Any) -> Any:
        _check(arguments)
        names = cpu_objects.registered(cpu_objects.call_key(function.__module__, function.__qualname__, arguments))
        if names is None:
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
        if module.split(".")[0] != PACKAGE:
            raise ValueError(f"{module}.{name} is not of {PACKAGE}: it registers no custom calls")
        _target(module, name, arguments)

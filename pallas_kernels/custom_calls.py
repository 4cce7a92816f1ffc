"""Names the custom calls that CPU kernels make, and makes them known to XLA: from a library that was compiled ahead,
from what an earlier process kept, or else by Numba.

A kernel asks for its call by the name of the function that registers it, ``target("row_ops.cpu_kernel:norm_target")``.
So no module that needs Numba is imported where a library (`cpu_objects`) or the disk (`kept_objects`) has the call.
Which calls this process made known is noted (`registrations`): a process that loads a compiled program and traces
nothing must register the same (`register_again`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from pallas_kernels import cpu_features, cpu_objects, kept_objects
from pallas_kernels.cpu_objects import Names
from pallas_kernels.sources import PACKAGE

Registration = tuple[str, str, tuple[Any, ...]]
"""Module, function and arguments that register custom calls."""

_registered: dict[Registration, Names] = {}


def target(function: str, *arguments: Any) -> Any:
    """Make the custom calls known that a function registers, and return what it returns: their names.

    Args:
        function: a module of this package and a function in it, ``module:function``, that `ffi.known_again` decorates.
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
    kinds = [getattr(argument, "kind", argument) for argument in arguments]
    if "amx" in kinds and not cpu_features.has_amx():
        raise ValueError("kind='amx' needs a processor with AMX that Linux lets this process use")


def _target(module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    if (names := found(module, name, arguments)) is not None:
        return names
    if find_spec("numba") is None:
        key = cpu_objects.call_key(module, name, arguments)
        raise ImportError(f"no loops were compiled ahead for {key}, and Numba is not installed: pip install numba")
    return getattr(import_module(module), name)(*arguments)


def found(module: str, name: str, arguments: tuple[Any, ...]) -> Names | None:
    """Make the custom calls known that a function registers, where that needs no compilation, and return their names;
    None if they must be compiled.

    Raises:
        ValueError: see `target`.
    """
    _check(arguments)
    if (names := _registered.get((module, name, arguments))) is not None:
        return names
    key = cpu_objects.call_key(module, name, arguments)
    names = cpu_objects.registered(key) or kept_objects.registered(module, key)
    if names is not None:
        note(module, name, arguments, names)
    return names


def note(module: str, name: str, arguments: tuple[Any, ...], names: Names) -> None:
    """Note that a function's custom calls are known to XLA."""
    _registered[module, name, arguments] = names


def registrations() -> list[Registration]:
    """Return what made the custom calls of this process known, for `register_again` in another one."""
    return [made for made in _registered if made[0].split(".")[0] == PACKAGE]


def kept_loops(made: Iterable[Registration]) -> dict[str, bytes]:
    """Return the code of registrations that Numba compiled, by `cpu_objects.call_key`, for `register_again`; without
    those that a library has, or that cannot be kept here."""
    keys = ((module, cpu_objects.call_key(module, name, arguments)) for module, name, arguments in made)
    found = {key: kept_objects.read(module, key) for module, key in keys}
    return {key: content for key, content in found.items() if content is not None}


def register_again(made: Iterable[Registration], loops: Mapping[str, bytes] = MappingProxyType({})) -> None:
    """Make custom calls known that a compiled program of another process calls: nothing is traced here.

    Args:
        made: what that process's `registrations` returned. It names code of this package that is run.
        loops: what its `kept_loops` returned, of a machine with the same processor, versions and sources. A call that
            is not there is compiled.

    Raises:
        ValueError: it names other code.
    """
    for module, name, arguments in made:
        if module.split(".")[0] != PACKAGE:
            raise ValueError(f"{module}.{name} is not of {PACKAGE}: it registers no custom calls")
        if found(module, name, arguments) is not None:
            continue
        content = loops.get(cpu_objects.call_key(module, name, arguments))
        names = None if content is None else kept_objects.load_content(content)
        if names is None:
            _target(module, name, arguments)
        else:
            note(module, name, arguments, names)

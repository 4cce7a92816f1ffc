"""Finds what a script for vLLM asks for: modules, names in modules, attributes, parameters, arguments and keys.

Each is taken, or refused with what to use here, as `jpaged.vllm_names` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from inspect import iscoroutinefunction
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

from jpaged.vllm_names import ARGUMENTS, IMPORTS, MEMBERS, MODULES, NEUTRAL, PARAMETERS, PROMPT_KEYS, TAKEN

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)

# ---------------------------------------------------------------- classes and calls


def refuse_parameters(owner: str, names: Iterable[str]) -> None:
    """Refuse parameters of one of vLLM's classes that ours of the same name does not have.

    Args:
        owner: one of `PARAMETERS`.

    Raises:
        TypeError: one of the names is such a parameter; the message says what to use here.
    """
    for name in names:
        if name in PARAMETERS[owner]:
            raise TypeError(f"{name} is a parameter of vLLM that {owner} has not: {PARAMETERS[owner][name]}")


def missing_attribute(owner: str, name: str) -> str:
    """Say why a public class has no such attribute and, where vLLM's has it, what to use instead."""
    reason = MEMBERS.get(owner, {}).get(name) or PARAMETERS.get(owner, {}).get(name)
    return f"{owner!r} object has no attribute {name!r}" + (f": {reason}" if reason else "")


def with_vllms_attributes(cls: _Class) -> _Class:
    """Let a class say, for an attribute that only vLLM's class of its name has, what to use instead."""

    def __getattr__(self: Any, name: str) -> Any:
        raise AttributeError(missing_attribute(cls.__name__, name), name=name, obj=self)

    cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
    return cls


def with_vllms_arguments(method: str) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Let a method refuse the arguments that only vLLM's has, unless they ask for nothing; see `ARGUMENTS`.

    Raises:
        TypeError: such an argument asks for something; the message says what to use here.
    """
    refused = ARGUMENTS[method]

    def checked(given: dict[str, Any]) -> dict[str, Any]:
        for name in refused.keys() & given.keys():
            value = given.pop(name)
            if not (_is_nothing(value) or value in NEUTRAL.get(name, ())):
                raise TypeError(f"{name}={value!r} is an argument of vLLM that {method} has not: {refused[name]}")
        return given

    def decorate(call: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        if iscoroutinefunction(call):

            @wraps(call)
            async def awaited(*args: Any, **given: Any) -> Any:
                return await call(*args, **checked(given))

            return cast(Callable[_Args, _Result], awaited)

        @wraps(call)
        def called(*args: Any, **given: Any) -> Any:
            return call(*args, **checked(given))

        return cast(Callable[_Args, _Result], called)

    return decorate


def check_prompt_keys(prompt: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that a prompt has no other keys than `known`, and vLLM's other ones only with nothing in them.

    Raises:
        ValueError: it has.
    """
    unknown = [key for key in prompt if key not in known and key not in PROMPT_KEYS]
    if unknown:
        raise ValueError(f"a prompt may have {', '.join(map(repr, known[:-1]))} and {known[-1]!r}, not {unknown}")
    for key in prompt.keys() & PROMPT_KEYS.keys():
        if not _is_nothing(prompt[key]):
            raise ValueError(f"a prompt has {key!r}: {PROMPT_KEYS[key]}")


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, Mapping) and not value)


# ---------------------------------------------------------------- modules and their names

_PACKAGE = "jpaged"


def name_in(module: str, name: str, *, has_file: bool = True) -> Any:
    """Return what vLLM's module has under a name; it is the `__getattr__` of a module.

    Args:
        module: the name of our module, which vLLM has too.
        has_file: whether it has names of its own: others are refused only if they are known.

    Raises:
        ImportError: jpaged lacks the name; the message says what to use here.
        AttributeError: vLLM has no such name either.
    """
    inner = module.removeprefix(_PACKAGE).removeprefix(".")
    if (place := TAKEN.get(inner, {}).get(name)) is not None:
        home, its_name = place.split(":")
        return getattr(import_module(home), its_name)
    path = f"{inner}.{name}".removeprefix(".")
    if not (name.startswith("_") or _is_known(path)):
        if (reason := IMPORTS.get(name) or MODULES.get(path)) is not None:
            raise ImportError(f"{module} has no {name}, which vLLM has: {reason}", name=module)
        if not has_file and (reason := _reason(path)) is not None:
            raise ImportError(f"{module}, the name of a module of vLLM, has no {name} here: {reason}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module that vLLM has and jpaged keeps elsewhere; None = vLLM has no such module.

    Args:
        name: the module's name in jpaged, of which there is no file.

    Raises:
        ModuleNotFoundError: jpaged has nothing of that module; the message says what to use here.
    """
    path = name.removeprefix(f"{_PACKAGE}.")
    if _is_known(path):
        return ModuleSpec(name, _Loader(), is_package=True)  # type: ignore[arg-type]  # importlib.abc takes long to import
    if (reason := _reason(path)) is not None:
        raise ModuleNotFoundError(f"there is no {name}, where vLLM has a module: {reason}", name=name)
    return None


class _Loader:
    """Loads a module that has no file: its names are those of `name_in`."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its `__getattr__`."""
        module.__getattr__ = lambda name: name_in(module.__name__, name, has_file=False)  # type: ignore[method-assign]


def _is_known(path: str) -> bool:
    """Tell whether names of a module of vLLM can be imported, or modules within it have rows of their own."""
    return path in TAKEN or any(each.startswith(f"{path}.") for each in (*TAKEN, *MODULES))


def _reason(path: str) -> str | None:
    """Return why there is no such module, as the row of the module or of the nearest one around it says."""
    while path:
        if path in MODULES:
            return MODULES[path]
        path = path.rpartition(".")[0]
    return None

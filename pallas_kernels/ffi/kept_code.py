"""Caches Numba's compiled code on disk until a file that it is made from changes."""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
from filelock import FileLock, Timeout
from llvmlite import binding
from platformdirs import user_cache_path

from pallas_kernels.cpu_features import FEATURES
from pallas_kernels.ffi.helpers import as_parts_of, njit

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 120.0
"""Seconds for which one process waits for another to compile."""

_compiling = threading.RLock()


class Compiled:
    """Has the attributes of what `numba.cfunc` returns; it is compiled when the first one is read.

    So a model has only the loops compiled that it calls, not all of their modules.
    """

    def __init__(self, compile_now: Callable[[], Any]):
        self._compile_now = compile_now
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        with _compiling:
            if self._made is None:
                self._made = self._compile_now()
        return getattr(self._made, name)


def cfunc(signature: Any, **options: Any) -> Callable[[Callable[..., None]], Compiled]:
    """Compile as `numba.cfunc` does, at the first use, but keep the code on disk until a file changes that it is made
    from.

    Numba by itself looks at the file of the function only, but what is compiled is also what it calls; see
    `cache_folder`. Processes that want the same function at once wait for the first. Where no folder can be written, or
    its disk is full, the code is compiled at every start, which is logged.
    """
    return lambda function: Compiled(lambda: _compiled(signature, function, **options))


def _compiled(signature: Any, function: Callable[..., None], **options: Any) -> Any:
    with _compiling, as_parts_of(function.__qualname__):  # the folder is a setting of the whole process
        before, folder = numba.config.CACHE_DIR, cache_folder(*_modules_of(function))
        numba.config.CACHE_DIR = str(folder)
        try:
            with _alone(folder / f"{function.__module__}.{function.__qualname__}.lock"):
                return numba.cfunc(signature, cache=True, **options)(function)
        except (RuntimeError, OSError) as error:
            logger.warning("compiled loops cannot be kept: %s; NUMBA_CACHE_DIR chooses a folder", error)
            return numba.cfunc(signature, **options)(function)
        finally:
            numba.config.CACHE_DIR = before


def cache_folder(*modules: str) -> Path:
    """Return the folder that keeps the code that is made from these modules of the package.

    It is another one when a file changes of these modules or of those that they import, directly or not, and for
    another version of Numba and another processor.
    """
    return Path(numba.config.CACHE_DIR or user_cache_path("pallas_kernels")) / _fingerprint(frozenset(modules))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes out until the end, where their file system can, and for some minutes at most."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(path, timeout=_WAIT_SECONDS))
        except (OSError, NotImplementedError, Timeout) as error:
            logger.debug("%s is not locked: %s", path, error)
        yield


def named(function: Callable[..., Any], name: str) -> Any:
    """Give a function that is created several times a unique name, and return it.

    Numba makes its symbol from its name and a number that restarts in every process. So two functions of the same name,
    cached by different processes, may have the same symbol, and then one is called instead of the other.
    """
    function.__name__ = function.__qualname__ = f"{function.__name__}_{name}"
    return function


def njit_named(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that is created several times, as `numba.njit` does, under a unique name; see `named`."""
    return lambda function: njit(named(function, name))


_PACKAGE = __name__.split(".")[0]
_ROOT = Path(__file__).parents[2]
"""The folder that holds the package."""
_IMPORT = re.compile(
    rf"^[ \t]*(?:from[ \t]+({_PACKAGE}[\w.]*)[ \t]+import[ \t]+(?:\(([^)]*)\)|([^\n]*))"
    rf"|import[ \t]+({_PACKAGE}[^\n]*))",
    re.MULTILINE,
)
"""Matches an import of this package's. Parsing the files with `ast` would take half a second at each start."""


def _modules_of(function: Callable[..., Any]) -> set[str]:
    """Return the package's modules that define a function and those that it calls, also where they were made by a
    function of a module that the function's own does not import."""
    found: set[str] = set()
    left, seen = [function], set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        module = getattr(one, "__module__", None)
        if isinstance(module, str) and module.split(".")[0] == _PACKAGE:
            found.add(module)
        code = getattr(one, "py_func", one)  # what `numba.njit` returns has the function
        if isinstance(code, FunctionType):
            left += [code.__globals__[name] for name in code.__code__.co_names if name in code.__globals__]
            left += inspect.getclosurevars(code).nonlocals.values()
    return found


@cache
def _fingerprint(modules: frozenset[str]) -> str:
    """Return a hash of the sources of the modules and of what they import, of Numba's version and of the processor."""
    digest = hashlib.sha256(_compiler().encode())
    for name in sorted(closure(modules)):
        digest.update(name.encode())
        digest.update(_source(name) or b"")
    return digest.hexdigest()[:16]


@cache
def _compiler() -> str:
    """Return what else the code depends on."""
    versions = (numba.__version__, llvmlite.__version__)
    host = binding.get_host_cpu_name(), sorted(binding.get_host_cpu_features().items())
    return repr((*versions, *host, sorted(FEATURES.items())))


def closure(modules: Iterable[str]) -> set[str]:
    """Return the modules, and those of the package that they import, directly or not."""
    found: set[str] = set()
    left = list(modules)
    while left:
        name = left.pop()
        if name not in found and _source(name) is not None:
            found.add(name)
            left += _imports(name)
    return found


@cache
def _imports(module: str) -> frozenset[str]:
    """Return the modules that a module imports, at its top or in a function, and names in them that may be modules."""
    found: set[str] = set()
    for origin, in_brackets, in_line, plain in _IMPORT.findall((_source(module) or b"").decode()):
        found |= {origin, *(f"{origin}.{name}" for name in re.findall(r"\w+", in_brackets or in_line))}
        found |= set(re.findall(rf"{_PACKAGE}[\w.]*", plain))
    return frozenset(found)


@cache
def _source(module: str) -> bytes | None:
    """Return the text of a module of the package; None if there is none of that name."""
    path = _ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_bytes()
    return None

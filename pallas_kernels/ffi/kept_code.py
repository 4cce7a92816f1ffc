"""Caches Numba's compiled code on disk until the package's files change."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba
from filelock import FileLock, Timeout
from platformdirs import user_cache_path

logger = logging.getLogger(__name__)

_PATIENCE = 120.0
"""Seconds for which one process waits for another to compile."""

_compiling = threading.RLock()


def cfunc(signature: Any, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Compile as `numba.cfunc` does, but keep the code on disk until any file of this package changes.

    Numba by itself looks at the file of the function only, but what is compiled is also what it calls. Processes that
    want the same function at once wait for the first. Where no folder can be written, or its disk is full, the code is
    compiled at every start, which is logged.
    """

    def compiled(function: Callable[..., None]) -> Any:
        with _compiling:  # the folder is a setting of the whole process
            before, folder = numba.config.CACHE_DIR, cache_folder()
            numba.config.CACHE_DIR = str(folder)
            try:
                with _alone(folder / f"{function.__module__}.{function.__qualname__}.lock"):
                    return numba.cfunc(signature, cache=True, **options)(function)
            except (RuntimeError, OSError) as error:
                logger.warning("compiled loops cannot be kept: %s; NUMBA_CACHE_DIR chooses a folder", error)
                return numba.cfunc(signature, **options)(function)
            finally:
                numba.config.CACHE_DIR = before

    return compiled


def cache_folder() -> Path:
    """Return the folder that keeps the code of this version of the package."""
    return Path(numba.config.CACHE_DIR or user_cache_path("pallas_kernels")) / _fingerprint()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes out until the end, where their file system can, and for some minutes at most."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(path, timeout=_PATIENCE))
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
    return lambda function: numba.njit(named(function, name))


@cache
def _fingerprint() -> str:
    """Return a hash of the files of `pallas_kernels`."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]

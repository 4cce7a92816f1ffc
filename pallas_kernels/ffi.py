"""Lets XLA on CPU call loops that Numba compiles, through its foreign function interface, on XLA's own threads.

A handler is a C function that takes the address of an ``XLA_FFI_CallFrame`` and returns 0 or an error. The offsets
below are those of ``xla/ffi/api/c_api.h`` on a 64-bit machine; its structures only ever grow at their ends.
Import this module only where Numba is installed.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numba
import numpy as np
from filelock import FileLock, Timeout
from llvmlite import binding
from numba import carray, njit, types
from platformdirs import user_cache_path

from pallas_kernels.ffi_primitives import add, address_of, allocate, call_with, free, load, pointer, run_range, store

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
Registration = tuple[str, str, tuple[Any, ...]]
"""Module, function and arguments that register custom calls."""
RUN = types.void(types.intp, types.intp, types.intp)
"""Signature of what `register` takes."""

# XLA_FFI_CallFrame.
_EXTENSION, _API, _CONTEXT, _NUM_ARGUMENTS, _ARGUMENTS, _RESULTS = 8, 16, 24, 56, 72, 112
# XLA_FFI_Extension_Base and XLA_FFI_Metadata_Extension: XLA asks for the version a handler was built against.
_EXTENSION_TYPE, _METADATA, _METADATA_TYPE = 8, 24, 1
_MAJOR, _MINOR, _TRAITS, _API_VERSION = 24, 28, 32, (0, 1)
# XLA_FFI_Buffer.
_DATA, _RANK, _DIMENSIONS = 24, 32, 40
# XLA_FFI_Api: its functions.
_ERROR_DESTROY, _SCHEDULE, _NUM_THREADS = 64, 136, 144

# A job: what the threads that share a call know of it. Words of 8 bytes.
_NEXT, _DONE, _OWNERS, _FRAME, _ITEMS, _GRAIN, _RUN = 0, 8, 16, 24, 32, 40, 48
_NEXT_BEFORE, _DONE_BEFORE, _ITEMS_BEFORE, _GRAIN_BEFORE, _BEFORE, _CALL, _JOB_BYTES = 56, 64, 72, 80, 88, 96, 136


_PATIENCE = 120.0
"""Seconds for which one process waits for what another one compiles."""

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
        if module.split(".")[0] != __package__:
            raise ValueError(f"{module}.{name} is not of {__package__}: it registers no custom calls")
        getattr(import_module(module), name)(*arguments)


def named(function: Callable[..., Any], name: str) -> Any:
    """Give a function that is made several times a name of its own, and return it.

    Its symbol is made of its name and of a number that begins anew in every process: two functions of one name that
    different processes kept on disk may have the same symbol, and then one is called in the other's place.
    """
    function.__name__ = function.__qualname__ = f"{function.__name__}_{name}"
    return function


@cache
def _fingerprint() -> str:
    """Return a hash of this package's files."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@njit
def _int32(address):
    return carray(pointer(address), (1,), np.int32)


@njit
def _answered(frame):
    """Tell whether the call only asked for the handler's version, which has then been given."""
    extension = load(frame + _EXTENSION)
    if extension == 0 or _int32(extension + _EXTENSION_TYPE)[0] != _METADATA_TYPE:
        return False
    metadata = load(extension + _METADATA)
    _int32(metadata + _MAJOR)[0] = _API_VERSION[0]
    _int32(metadata + _MINOR)[0] = _API_VERSION[1]
    _int32(metadata + _TRAITS)[0] = 0
    return True


@njit
def argument(frame, index):
    """Return the address of an argument's ``XLA_FFI_Buffer``."""
    return load(load(frame + _ARGUMENTS) + 8 * index)


@njit
def arguments(frame):
    """Return how many arguments there are."""
    return load(frame + _NUM_ARGUMENTS)


@njit
def result(frame, index):
    """Return the address of a result's ``XLA_FFI_Buffer``."""
    return load(load(frame + _RESULTS) + 8 * index)


@njit
def dimension(buffer, axis):
    """Return the length of one axis of a buffer."""
    return load(load(buffer + _DIMENSIONS) + 8 * axis)


@njit
def elements(buffer):
    """Return the number of a buffer's elements."""
    number = 1
    for axis in range(load(buffer + _RANK)):
        number *= dimension(buffer, axis)
    return number


@njit
def address(buffer):
    """Return where a buffer's elements are."""
    return load(buffer + _DATA)


@njit
def data(buffer):
    """Return the address of a buffer's elements in the form that `numba.carray` takes."""
    return pointer(address(buffer))


@njit
def _succeeded(frame, function, call):
    """Call a function of ``XLA_FFI_Api`` with the structure at `call`, whose first two words are filled in here."""
    store(call, 40)
    store(call + 8, 0)
    error = call_with(load(load(frame + _API) + function), call)
    if error == 0:
        return True
    store(call, 24)
    store(call + 16, error)
    call_with(load(load(frame + _API) + _ERROR_DESTROY), call)
    return False


@njit
def _num_threads(frame, job):
    """Return the number of threads of XLA's pool, 1 where there is none."""
    call = job + _CALL
    store(call + 16, load(frame + _CONTEXT))
    store(call + 24, job + _NEXT)
    threads = load(job + _NEXT) if _succeeded(frame, _NUM_THREADS, call) else 1
    store(job + _NEXT, 0)
    return threads


@njit
def _release(job):
    if add(job + _OWNERS, -1) == 1:
        free(job)


@njit
def _work(job):
    items, grain, frame = load(job + _ITEMS_BEFORE), load(job + _GRAIN_BEFORE), load(job + _FRAME)
    while items > 0:
        begin = add(job + _NEXT_BEFORE, grain)
        if begin >= items:
            break
        end = min(begin + grain, items)
        run_range(load(job + _BEFORE), frame, begin, end)
        add(job + _DONE_BEFORE, end - begin)
    while items > 0 and add(job + _DONE_BEFORE, 0) < items:
        pass
    items, grain = load(job + _ITEMS), load(job + _GRAIN)
    while True:
        begin = add(job + _NEXT, grain)
        if begin >= items:
            return
        end = min(begin + grain, items)
        run_range(load(job + _RUN), frame, begin, end)
        add(job + _DONE, end - begin)


@cfunc(types.void(types.intp))
def _task(job):
    """Do a pool thread's part of a call; if it comes late, nothing is left to do."""
    _work(job)
    _release(job)


binding.add_symbol("jpaged_ffi_task", _task.address)


def register(
    name: str,
    run: Any,
    *,
    items_of: tuple[tuple[int, int], ...],
    portion: int = 1,
    grains: int = 8,
    before: tuple[Any, int, int] | None = None,
) -> None:
    """Make compiled loops known to XLA's CPU backend as the target `name` of a custom call.

    A second call for a name does nothing: engines that are made in several threads at once ask for the same targets.

    A call returns when its items are computed. Its job outlives it where a thread of the pool comes late, and is
    freed by the last of its owners.

    Args:
        run: ``cfunc(RUN)`` of a frame and a range of items, which it computes; called on several threads at once.
        items_of: an argument and one of its axes, whose lengths' product, `portion` at a time, are a call's items.
        grains: items are handed out so many times a thread; several even out items of different cost.
        before: a `run`, and an argument and one of its axes, whose length is its number of items; they are computed,
            by the same threads, before the first of the others.
    """
    with _registering:
        if name not in _alive:
            handler = _handler(name, run, items_of, portion, grains, before or (run, -1, 0))
            _alive[name] = run, before, handler
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler.address), platform="cpu")


def _handler(
    name: str,
    run: Any,
    items_of: tuple[tuple[int, int], ...],
    portion: int,
    grains: int,
    before: tuple[Any, int, int],
) -> Any:
    """Compile what XLA calls, which finds `run` and what comes before it by symbols."""
    symbol, symbol_before = f"{name}_run", f"{name}_before"
    first, items_argument, items_axis = before
    binding.add_symbol(symbol, run.address)
    binding.add_symbol(symbol_before, first.address)

    def handler(frame):
        if _answered(frame):
            return 0
        items = 1
        for index, axis in items_of:
            items *= dimension(argument(frame, index), axis)
        items = (items + portion - 1) // portion
        items_before = 0 if items_argument < 0 else dimension(argument(frame, items_argument), items_axis)
        job = allocate(_JOB_BYTES)
        threads = max(1, min(_num_threads(frame, job), items))
        store(job + _DONE, 0)
        store(job + _OWNERS, 1)
        store(job + _FRAME, frame)
        store(job + _ITEMS, items)
        store(job + _GRAIN, max(1, items // (threads * grains)))
        store(job + _RUN, address_of(symbol))
        store(job + _NEXT_BEFORE, 0)
        store(job + _DONE_BEFORE, 0)
        store(job + _ITEMS_BEFORE, items_before)
        store(job + _GRAIN_BEFORE, max(1, items_before // (threads * 2)))
        store(job + _BEFORE, address_of(symbol_before))
        call = job + _CALL
        for _ in range(1, threads):
            add(job + _OWNERS, 1)
            store(call + 16, load(frame + _CONTEXT))
            store(call + 24, address_of("jpaged_ffi_task"))
            store(call + 32, job)
            if not _succeeded(frame, _SCHEDULE, call):
                _release(job)
        _work(job)
        while add(job + _DONE, 0) < items:
            pass
        _release(job)
        return 0

    return cfunc(types.intp(types.intp))(named(handler, name))  # kept on disk as it closes over plain values only


_registering = threading.Lock()
_registrations: dict[Registration, None] = {}
_alive: dict[str, tuple[Any, ...]] = {}
"""Compiled functions whose addresses XLA holds, by the target's name."""

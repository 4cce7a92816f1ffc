"""Keeps the loops that Numba compiled as machine code on disk, and loads it without Numba, whose import takes a second.

A file holds one call of `custom_calls.target`: the names of its custom calls, and an object with a C function for each,
as `pallas_kernels.ffi.loops` makes it. llvmlite, which comes with Numba, links an object in memory. A file is of a
folder whose name says what it was made from (`folder`), so that it is never used for anything else.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from pallas_kernels.cpu_features import FEATURES
from pallas_kernels.cpu_objects import Names, make_known
from pallas_kernels.sources import closure, digest

FORMAT = 1
"""Version of what a file holds."""
VARIABLE = "NUMBA_CACHE_DIR"
"""The environment variable that names another folder than the user's cache folder, as for all that Numba compiles."""
_OPTIONS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT")
"""Variables on which the code depends."""
_WAIT_SECONDS = 120.0
"""Seconds for which one process waits for another to compile."""

logger = logging.getLogger(__name__)
_loading = threading.Lock()
_engines: list[Any] = []
"""Engines that own the memory of loaded code; they are kept, as XLA calls the code until the process ends."""


def registered(module: str, key: str) -> Names | None:
    """Make the custom calls known to XLA that a key stands for, and return their names; None if they are not kept.

    Args:
        module: the module of the function that registers the calls.
        key: see `cpu_objects.call_key`.
    """
    content = read(module, key)
    return None if content is None else load_content(content)


def read(module: str, key: str) -> bytes | None:
    """Return the content of the file of what a key stands for; None if it is not kept."""
    path = path_of(module, key)
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def load_content(content: bytes) -> Names | None:
    """Make the custom calls of a file known to XLA and return their names; None if it is damaged."""
    try:
        header, _, code = content.partition(b"\n")
        names, checksum = json.loads(header)
    except ValueError:
        return None
    if checksum != sha256(code).hexdigest():  # a disk was full, or the machine went down
        return None
    names = names if isinstance(names, str) else tuple(names)
    load(names, code)
    return names


def keep(module: str, key: str, names: Names, code: bytes) -> None:
    """Store an object with the C functions `names`; where that fails, each process compiles its own and logs so
    once."""
    path = path_of(module, key)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(json.dumps([names, sha256(code).hexdigest()]).encode() + b"\n" + code)
                file.close()
                os.replace(file.name, path)
            except OSError:
                with suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        _warn_once(path.parent.parent, error.strerror or str(error))  # once, though there are a dozen loops


@cache
def _warn_once(folder: Path, reason: str) -> None:
    logger.warning("compiled loops cannot be kept in %s: %s; %s chooses a folder", folder, reason, VARIABLE)


def load(names: Names, code: bytes) -> None:
    """Link an object in memory and make its C functions known to XLA as custom calls."""
    from llvmlite import binding

    with _loading:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        with suppress(RuntimeError):  # where the interpreter does not export C's functions of numbers itself
            binding.load_library_permanently("libm.so.6")
        machine = binding.Target.from_default_triple().create_target_machine(jit=True)
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _engines.append(engine)
    make_known(names, engine.get_function_address)


@contextmanager
def alone(module: str, key: str) -> Iterator[None]:
    """Keep other processes from compiling what a key stands for, where their file system can, and for some minutes at
    most."""
    path = path_of(module, key)
    with ExitStack() as stack:
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(path.with_suffix(".lock"), timeout=_WAIT_SECONDS))
        except (OSError, NotImplementedError, Timeout) as error:
            logger.debug("%s is not locked: %s", path, error)
        yield


@cache
def folder(module: str) -> Path | None:
    """Return the folder of code that is made from a module of the package; None where there is no such module or no
    compiler.

    It is another one when a file changes of this module or of those that it imports, directly or not, and for another
    version of Numba and another processor.
    """
    sources, compiler = sorted(closure({module})), _compiler()
    if not sources or compiler is None:
        return None
    made_from = sha256((digest(sources) + compiler).encode()).hexdigest()[:16]
    return Path(os.environ.get(VARIABLE) or user_cache_path("pallas_kernels")) / made_from


@cache
def _compiler() -> str | None:
    """Return what else the code depends on; None where Numba is not installed."""
    try:
        from llvmlite import binding

        versions = version("numba"), version("llvmlite")
    except (ImportError, PackageNotFoundError):
        return None
    host = binding.get_host_cpu_name(), sorted(binding.get_host_cpu_features().items())
    options = [os.environ.get(name) for name in _OPTIONS]
    return repr((FORMAT, *versions, *host, sorted(FEATURES.items()), options))


def path_of(module: str, key: str) -> Path | None:
    """Return the file of what a key stands for, which may not be there yet; None where nothing can be kept."""
    where, start = folder(module), re.sub(r"[^A-Za-z0-9_.]+", "-", key)[:80]
    return where and where / f"{start}-{sha256(key.encode()).hexdigest()[:8]}.loops"

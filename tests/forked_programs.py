"""Runs programs in processes forked from one that has imported what all of them import.

A program that starts from nothing imports jax, flax, transformers, and often torch, for three to six seconds of a core.
The process that is forked, one for each interpreter and its settings of JAX, imports them once. It has no devices and
no threads of JAX, which makes both when it first computes; NumPy's OpenBLAS ends its own before a fork. This file is
also that process's program, which needs nothing but Python.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any


class ProgramServer:
    """A process that has imported modules, and forks.

    Args:
        python: the interpreter.
        modules: what it imports before; one that cannot be imported is left out, and a program that needs it says why.
        environment: its variables. JAX reads its own as it is imported, so a program's have to be the same.
    """

    def __init__(self, python: Path | str, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [python, __file__, *modules],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # so that no answer waits in a buffer that `select` does not see
        )
        atexit.register(self.close)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                _given(stream).close()
        self._process.wait()

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, as ``python ARGUMENTS`` would here.

        Args:
            arguments: a program's path and what it is given, or ``-m`` and a module's name before that.
            environment: all variables of the process.
            timeout: seconds.

        Raises:
            subprocess.TimeoutExpired: the program did not end; it was killed.
            RuntimeError: the process that forks has ended.
        """
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / name for name in ("out", "err")]
            request = {
                "arguments": list(arguments),
                "environment": dict(environment),
                "folder": os.getcwd(),
                "outputs": list(map(str, outputs)),
            }
            with suppress(BrokenPipeError):  # that it has ended, the answer says
                _given(self._process.stdin).write(json.dumps(request).encode() + b"\n")
            program = self._answer(None)
            try:
                status = self._answer(timeout)
            except BaseException as error:  # an interrupt too ends the program, as in `subprocess.run`
                with suppress(ProcessLookupError):  # it may have ended just now
                    os.kill(program, signal.SIGKILL)
                with suppress(RuntimeError):  # the next program would be given this one's status
                    self._answer(None)
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired(list(arguments), timeout) from None
                raise
            printed = [output.read_text(errors="replace") for output in outputs]
            return subprocess.CompletedProcess(list(arguments), status, *printed)

    def _answer(self, timeout: float | None) -> int:
        answers = _given(self._process.stdout)
        if not select.select([answers], [], [], timeout)[0]:
            raise TimeoutError
        line = answers.readline()
        if not line:
            raise RuntimeError(f"the process that runs programs ended with {self._process.wait()}")
        return int(line)


WRITES = os.O_WRONLY | os.O_CREAT
_SERVERS: dict[tuple[Any, ...], ProgramServer] = {}


def run_forked(
    python: Path | str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    modules: Sequence[str],
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process forked from one that has imported modules; see `ProgramServer`.

    On a Mac it is a process of its own: the system's libraries for arrays may fail in a fork.
    """
    if sys.platform == "darwin":
        command = [python, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    of_jax = tuple(sorted((name, value) for name, value in environment.items() if name.startswith("JAX_")))
    key = str(python), tuple(modules), of_jax
    if key not in _SERVERS or _SERVERS[key].has_ended:
        _SERVERS[key] = ProgramServer(python, modules, environment)
    return _SERVERS[key].run(arguments, environment, timeout)


def _given(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _serve(modules: Sequence[str]) -> dict[str, Any] | None:
    """Fork for each line of standard input; return in a child what it has to run, and None at the end of the input.

    A child's id is printed as it begins, its status as it ends.
    """
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each child would go through all of this, and have its own copy then
    warnings.filterwarnings("ignore", message=".*fork.*")
    for line in sys.stdin:
        program = os.fork()
        if not program:
            return json.loads(line)
        print(program, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]), flush=True)
    return None


def _become(request: dict[str, Any]) -> None:
    """Turn this process into the one that an interpreter would have started, by its streams, variables, folder and
    path, and run its program."""
    streams = [os.open(os.devnull, os.O_RDONLY), *(os.open(path, WRITES, 0o600) for path in request["outputs"])]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    is_module = request["arguments"][0] == "-m"
    sys.argv = request["arguments"][is_module:]
    own = os.getcwd() if is_module else str(Path(sys.argv[0]).resolve().parent)
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [own, *given, *(path for path in sys.path[1:] if path not in given)]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__" and (_request := _serve(sys.argv[1:])):
    _become(_request)

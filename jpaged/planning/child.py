"""Runs a plan or a compilation in a child process: started by its path, with a request as JSON on standard input.

Its environment has jax and a compiler, but perhaps not jpaged: the packages that the request names are taken from
where they lie. The answer is the last line of standard output.
"""

import contextlib
import ctypes
import importlib.util
import json
import signal
import sys
from pathlib import Path


def make_known(name: str, origin: str) -> None:
    """Import a package, or a module, from its file."""
    folder = [str(Path(origin).parent)] if Path(origin).name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, origin, submodule_search_locations=folder)
    assert spec is not None and spec.loader is not None, origin
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def end_with_parent() -> None:
    """Have this process killed when the thread that waits for its answer has ended (Linux): a compiler that is left
    alone goes on for minutes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    end_with_parent()
    request = json.load(sys.stdin)
    for name, origin in request["packages"].items():
        make_known(name, origin)
    if request["task"] == "plan":
        from jpaged.planning.compile_step import answer
    else:
        from jpaged.planning.write_programs import answer

    print(json.dumps(answer(request)))


if __name__ == "__main__":
    main()

"""Attention's loops are compiled in another process, and found by the one that needs them."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from threading import Event
from threading import enumerate as threads
from time import sleep

import pytest

pytest.importorskip("numba")

from pallas_kernels import cpu_objects, kept_objects
from pallas_kernels.paged_attention import numba_precompile


class Commands(list):
    """What was started; `running` is set when the processes end."""

    def __init__(self):
        self.running = Event()
        self.running.set()


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The commands of the processes that were started, none of which runs, with an empty cache."""
    commands = Commands()
    monkeypatch.setattr(kept_objects, "folder", lambda _: tmp_path)

    class Process:
        def __init__(self, command, **_):
            commands.append(command)

        def wait(self):
            commands.running.wait()
            return 0

    monkeypatch.setattr(numba_precompile.subprocess, "Popen", Process)
    monkeypatch.setattr(numba_precompile, "num_cores", lambda: 2)
    return commands


def test_a_process_is_started_for_loops_that_are_not_on_disk(started):
    numba_precompile.compile_ahead("float32")
    ((python, option, code, dtype, waiting),) = started
    assert (python, option, dtype) == (sys.executable, "-c", "float32")
    assert Path(waiting).parent == kept("float32").parent
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    named = [(node.module, alias.name) for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert ("pallas_kernels.paged_attention.cpu_call", "target") in named
    assert all(callable(getattr(import_module(module), name)) for module, name in named)
    for node in imports:
        if isinstance(node, ast.Import):
            assert all(import_module(alias.name) for alias in node.names)


def kept(dtype):
    """The file of the loops for views of a dtype."""
    module = "pallas_kernels.paged_attention.cpu_call"
    return kept_objects.path_of(module, cpu_objects.call_key(module, "target", (dtype,)))


def test_none_is_started_when_they_are_there_and_other_dtypes_have_loops_of_their_own(started):
    kept("float32").touch()
    assert numba_precompile.compile_ahead("float32") is None and started == []
    numba_precompile.compile_ahead("int8")
    assert len(started) == 1


def test_engines_that_are_opened_at_once_share_one_process(started):
    started.running.clear()
    assert numba_precompile.compile_ahead("float32") is not None
    assert numba_precompile.compile_ahead("float32") is None and len(started) == 1
    assert numba_precompile.compile_ahead("int8") is not None  # other loops
    started.running.set()
    for thread in threads():
        if thread.name == "jpaged-loops":
            thread.join()
    assert numba_precompile.compile_ahead("float32") is not None  # the first one failed: nothing is on disk
    assert len(started) == 3


def test_none_is_started_on_a_single_core(started, monkeypatch):
    monkeypatch.setattr(numba_precompile, "num_cores", lambda: 1)
    assert numba_precompile.compile_ahead("float32") is None and started == []


def test_a_process_that_cannot_be_started_and_a_folder_that_cannot_be_written_are_no_errors(started, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(numba_precompile.subprocess, "Popen", refuse)
    assert numba_precompile.compile_ahead("float32") is None
    monkeypatch.setattr(kept_objects, "folder", lambda _: Path("/proc/nowhere"))
    assert numba_precompile.compile_ahead("float32") is None


def test_what_this_process_compiled_is_found():
    from pallas_kernels.paged_attention.cpu_call import target

    target("float32")
    assert kept("float32").exists()


PARENT = """
import subprocess, sys
from pallas_kernels.paged_attention import numba_precompile
start = numba_precompile._COMMAND.index("from pallas_kernels")
command = numba_precompile._COMMAND[:start] + "time.sleep(600)"  # in place of the loops
child = subprocess.Popen([sys.executable, "-c", command, "float32", sys.argv[1]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition):
    for _ in range(1200):
        if condition():
            return
        sleep(0.05)
    raise AssertionError("it took more than a minute")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which processes live")
@pytest.mark.parametrize("awaited", [False, True])
def test_it_ends_with_its_parent_unless_another_process_waits(awaited, tmp_path):
    import fcntl

    file = tmp_path / "loops.waiting"
    with subprocess.Popen([sys.executable, "-c", PARENT, file], stdin=-1, stdout=-1) as parent:
        child = int(parent.stdout.readline())
        with file.open("ab") as lock:
            if awaited:
                fcntl.flock(lock, fcntl.LOCK_SH)
            parent.kill()
            parent.wait()
            if awaited:
                sleep(0.5)
                assert alive(child)
        until(lambda: not alive(child))


def test_it_ends_well_while_its_parent_lives(tmp_path):
    """A thread that waits for the end of a buffered standard input makes Python abort at its own end."""
    start = numba_precompile._COMMAND.index("from pallas_kernels")
    command = numba_precompile._COMMAND[:start] + "time.sleep(0.2)"  # in place of the loops
    with subprocess.Popen([sys.executable, "-c", command, "float32", tmp_path / "waiting"], stdin=-1) as child:
        assert child.wait() == 0


def test_an_engine_that_finds_another_ones_process_holds_a_lock_while_it_waits(started):
    fcntl = pytest.importorskip("fcntl")
    started.running.clear()
    assert numba_precompile.compile_ahead("float32") is not None
    ((*_, waiting),) = started
    with open(waiting, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        assert numba_precompile.compile_ahead("float32") is None
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    started.running.set()

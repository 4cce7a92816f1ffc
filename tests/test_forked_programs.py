"""A program in a forked process finds what it would find in a process of its own, and ends as it would there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_programs import ProgramServer, run_forked

SAYS = """
import json, os, sys
import neighbour
print(json.dumps([__name__, sys.argv, os.getcwd(), sys.path[:2], os.environ["GIVEN"], "HOME" in os.environ]))
print("words", file=sys.stderr)
print(sys.stdin.read(), end="")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def server():
    server = ProgramServer(sys.executable, ["json", "no_such_module"], os.environ)
    yield server
    server.close()


@pytest.fixture
def program(tmp_path) -> Path:
    (tmp_path / "neighbour.py").touch()
    (tmp_path / "says.py").write_text(SAYS)
    return tmp_path / "says.py"


@pytest.mark.parametrize("module", [False, True])
def test_a_program_runs_as_in_a_process_of_its_own(server, program, monkeypatch, module):
    monkeypatch.chdir(program.parent)
    environment = {"PYTHONPATH": str(Path(__file__).parent), "GIVEN": "a"}
    command = ["-m", "says"] if module else [str(program)]
    for status in ("0", "3"):
        arguments = [*command, status, "b c"]
        alone = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        forked = server.run(arguments, environment, timeout=60)
        assert forked.returncode == alone.returncode == int(status)
        assert json.loads(forked.stdout) == json.loads(alone.stdout)
        assert forked.stderr == alone.stderr == "words\n"


def test_what_one_program_does_to_its_process_is_not_there_for_the_next(server, tmp_path):
    (tmp_path / "changes.py").write_text("import json\nassert not hasattr(json, 'changed')\njson.changed = 1\n")
    runs = [server.run([str(tmp_path / "changes.py")], os.environ, timeout=60) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs


def test_an_error_is_on_its_standard_error_and_a_signal_its_status(server, tmp_path):
    (tmp_path / "fails.py").write_text("raise ValueError('so it is')\n")
    (tmp_path / "dies.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    failed = server.run([str(tmp_path / "fails.py")], os.environ, timeout=60)
    assert failed.returncode == 1 and failed.stderr.endswith("ValueError: so it is\n")
    assert server.run([str(tmp_path / "dies.py")], os.environ, timeout=60).returncode == -15


def test_a_program_that_does_not_end_in_time_is_killed_and_the_next_one_runs(server, program):
    (program.parent / "hangs.py").write_text("import signal\nsignal.pause()\n")
    with pytest.raises(subprocess.TimeoutExpired):
        server.run([str(program.parent / "hangs.py")], os.environ, timeout=0.2)
    assert server.run([str(program), "0"], os.environ | {"GIVEN": ""}, timeout=60).returncode == 0


def test_an_interrupt_ends_the_program_and_the_next_one_runs(server, program):
    (program.parent / "hangs.py").write_text(
        "import os, signal, sys\nprint(os.getpid(), file=open(sys.argv[1], 'w'), flush=True)\n"
        "os.kill(int(sys.argv[2]), signal.SIGINT)\nsignal.pause()\n"
    )
    number = program.parent / "number"
    with pytest.raises(KeyboardInterrupt):
        server.run([str(program.parent / "hangs.py"), str(number), str(os.getpid())], os.environ, timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)
    assert server.run([str(program), "0"], os.environ | {"GIVEN": ""}, timeout=60).returncode == 0


def test_a_module_that_fails_is_left_to_the_program_that_needs_it(tmp_path):
    (tmp_path / "fails.py").write_text("raise ValueError('so it is')\n")
    (tmp_path / "imports.py").write_text("import fails\n")
    server = ProgramServer(sys.executable, ["fails"], os.environ | {"PYTHONPATH": str(tmp_path)})
    try:
        run = server.run([str(tmp_path / "imports.py")], os.environ, timeout=60)
        assert run.returncode == 1 and run.stderr.endswith("ValueError: so it is\n")
    finally:
        server.close()


def test_a_server_that_has_ended_is_named_and_another_one_runs_the_next_program(tmp_path):
    (tmp_path / "parent.py").write_text("import os, sys\nos.kill(os.getppid(), int(sys.argv[1]))\nprint('is there')\n")
    run = [sys.executable, [str(tmp_path / "parent.py"), str(int(signal.SIGKILL))], os.environ]
    with pytest.raises(RuntimeError, match="ended with -9"):
        run_forked(*run, modules=["json"])
    run[1][1] = "0"
    assert run_forked(*run, modules=["json"]).stdout == "is there\n"


def test_a_mac_forks_no_process_that_has_imported_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr("forked_programs.sys.platform", "darwin")
    (tmp_path / "parent.py").write_text("import os\nprint(os.getppid())\n")
    done = run_forked(sys.executable, [str(tmp_path / "parent.py")], os.environ, modules=["json"])
    assert int(done.stdout) == os.getpid()

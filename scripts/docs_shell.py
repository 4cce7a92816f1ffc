"""Runs the shell commands of Markdown pages as a reader would type them, with this environment's `jpaged`.

    python scripts/docs_shell.py README.md docs/serving.md
    python scripts/docs_shell.py docs/getting_started.md --models FOLDER    # of scripts/docs_stand_ins.py

The commands of a block run in order, in a folder of their own. `jpaged serve` runs in the background on a free port
until its block ends. `REASONS` lists the kinds of lines that are skipped, each with its reason; a block that is skipped
gives its own: ``<!-- not run: ... -->``. ``<!-- before: ... -->`` has commands that a block needs and should not show.
``tests/docs/test_docs_shell.py`` runs all pages, and ``scripts/try_as_new.py`` runs them with a wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from docs_markdown import CodeBlock, commands_of, shell_blocks

REASONS = {
    r"(\S+/)?pip (install|download|wheel) ": "installs; scripts/check_wheel.sh and try_as_new.py install a wheel",
    r"python3? -m (venv|build) ": "makes environments and packages; scripts/check_wheel.sh does it",
    r"bash scripts/(demo|test|aot_env)\.sh|source ": "makes an environment of gigabytes; .ci/run does it",
    r"scripts/benchmarks/peer_engines/environment\.sh ": "installs another engine, of gigabytes",
    r"jpaged plan |jpaged compile .*--device |bash scripts/plan": "compiles for minutes: tests/aot/test_aot_plan.py",
    r"jpaged bench ": "measures for minutes; tests/bench does it on a small model",
    r"(taskset \S+ \S+ )?(\S+=\S+ )*(\S+/)?python scripts/(bench|sharing|gpu|tpu|peers|ray|rl|install|import)[_/]": (
        "measures or trains for minutes; tests/docs/test_docs_commands.py checks the options"
    ),
    r"(\S+=\S+ )*(\S+/)?python -m scripts\.benchmarks": "measures for minutes",
    r"(\S+=\S+ )*(\S+/)?python -m scripts\.compiled_code": "compiles for devices that are not here",
    r"(\S+/)?python -m pytest ": "is a test",
    r"serve run ": "starts Ray; tests/integrations/ray/test_serve_script.py does it",
    r"gcloud |bash scripts/tpu/": "needs a TPU, and none was at hand",
}
"""Beginnings of lines that are not run, as regular expressions, and why not."""

READY = 600
"""Seconds that a command has; the machine may be busy, and each process compiles anew."""
TYPED = "Hello\n\n"
"""Input of a command that asks for some (`jpaged chat`)."""


def reason_of(block: CodeBlock, line: str) -> str | None:
    """Return why a line of a block is not run; None = it is."""
    return block.not_run or next((reason for start, reason in REASONS.items() if re.match(start, line)), None)


def run_lines(block: CodeBlock) -> list[str]:
    """Return the lines of a block that are run."""
    return [line for line in commands_of(block) if reason_of(block, line) is None]


def run_block(block: CodeBlock, folder: Path, programs: Path) -> str:
    """Run a block in a folder, programs of `programs` first; return what it printed.

    Raises:
        RuntimeError: a command failed; has the end of its output.
    """
    environment = _environment(folder, programs)
    port = _free_port()
    server: subprocess.Popen[bytes] | None = None
    log = folder / f"serve-{block.line}.log"
    printed = _run(block.before, folder, environment) if block.before else ""
    try:
        for line in run_lines(block):
            if re.match(r"(\S+/)?jpaged serve ", line):
                with log.open("wb") as file:
                    command = ["bash", "-c", f"exec {line.partition(' #')[0]} --port {port}"]
                    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
                _wait(server, port, line, log)
            else:
                printed += _run(line.replace("localhost:8000", f"localhost:{port}"), folder, environment)
        if server is not None:
            server.terminate()
            if server.wait(READY) != 0:
                raise RuntimeError(f"the server ended with {server.returncode}: {log.read_text()[-2000:]}")
    finally:
        if server is not None:
            server.kill()
            server.wait()
    return printed


def _environment(folder: Path, programs: Path) -> dict[str, str]:
    """Return variables with which `jpaged` and `.venv/bin/jpaged` are those of `programs`, and curl fails on errors."""
    (folder / ".venv").mkdir(exist_ok=True)
    if not (folder / ".venv" / "bin").exists():
        (folder / ".venv" / "bin").symlink_to(programs)
    (folder / ".curlrc").write_text("fail-with-body\nno-progress-meter\n")
    return os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CURL_HOME": str(folder)}


def _run(line: str, folder: Path, environment: dict[str, str]) -> str:
    """Run lines of a shell to their end; return what they printed."""
    both = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    shell = subprocess.Popen(
        ["bash", "-euc", line], cwd=folder, env=environment, text=True, start_new_session=True, **both
    )
    try:
        printed, errors = shell.communicate(TYPED, timeout=READY)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)  # what the shell has started too
        shell.wait()
        raise
    if shell.returncode:
        raise RuntimeError(f"{line!r} ended with {shell.returncode}: {printed[-1000:]}{errors[-2000:]}")
    return printed


def _wait(server: subprocess.Popen[bytes], port: int, line: str, log: Path) -> None:
    """Wait until a server answers.

    Raises:
        RuntimeError: it ended, or did not answer in time.
    """
    began = time.monotonic()
    while server.poll() is None and time.monotonic() - began < READY:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"{line!r} does not answer: {log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--models", type=Path, help="folder whose content each page finds in its own")
    options = parser.parse_args(arguments)
    for page in options.pages:
        with tempfile.TemporaryDirectory() as own:
            if options.models is not None:
                shutil.copytree(options.models, own, dirs_exist_ok=True)
            for block in shell_blocks(page.read_text()):
                print(run_block(block, Path(own), Path(sys.executable).parent), flush=True)


if __name__ == "__main__":
    main()

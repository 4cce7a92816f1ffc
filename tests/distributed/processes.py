"""Runs one script in several processes of one run, as several hosts would."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from on_devices import with_devices

SCRIPT = Path(__file__).parent / "generate.py"


class Ended(NamedTuple):
    """What is left of a process."""

    status: int
    output: str
    errors: str


def start(count: int, task: str, folder: Path, *, devices: int = 2) -> list[subprocess.Popen[str]]:
    """`count` processes of `generate.py`, each with its own virtual devices."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), address, str(count), str(number), task, str(folder)],
            env=with_devices(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float) -> list[Ended]:
    """Waits for all to end; leaves none running."""
    try:
        ended = []
        for process in processes:
            output, errors = process.communicate(timeout=timeout)
            ended.append(Ended(process.returncode, output, errors))
        return ended
    finally:
        for process in processes:
            process.kill()

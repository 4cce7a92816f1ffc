"""Counts page faults, instructions and processor seconds of a start and of steady steps, phase by phase.

Seconds of the kernel tell little on virtual machines: clearing a page takes thirty times as long where the host has to
find the memory first. Counts repeat on any machine.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import resource
import struct
import subprocess
import sys
import tempfile
from typing import Any

from scripts.benchmarks.start import environment, fetched

Row = dict[str, Any]
PR_SET_THP_DISABLE = 41
"""Option of Linux' prctl, which a process keeps when it executes another program."""
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
"""Number of the system call by processor."""
_ATTRIBUTE_BYTES = 112
_INHERIT = 2
"""Flag of the attributes: threads that begin later count too."""
HARDWARE_INSTRUCTIONS = (0, 1)
SOFTWARE_PAGE_FAULTS = (1, 2)
"""Types and numbers of two events, from linux/perf_event.h."""


def start_phases(
    model: str = "smollm2-135m", tokens: int = 16, sequences: int = 16, small_pages: bool = False, cold: bool = False
) -> list[Row]:
    """Page faults, instructions and processor seconds of each phase of a start, and of steps after it (Linux).

    "again" phases repeat the one before: in a steady state no step touches new memory, and their faults are 0.
    Instructions are counted where the machine shows its counters; many virtual machines do not.

    Args:
        tokens: that each sequence generates in a phase.
        sequences: of a batch.
        small_pages: let Linux give small pages only, so that faults times their size are the bytes that were touched
            for the first time, or again after they were given back; the same on every machine.
        cold: report the first process in an empty cache folder, instead of the second.
    """
    command = [sys.executable, "-m", "scripts.benchmarks.start_phases", fetched(model), str(tokens), str(sequences)]
    command.append("small" if small_pages else "any")
    with tempfile.TemporaryDirectory() as caches:
        for _ in range(1 if cold else 2):
            done = subprocess.run(command, env=environment(caches), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


class Counter:
    """Counts an event in this thread and in all that begin later.

    Attributes:
        works: whether the machine counts it.
    """

    def __init__(self, kind: int, event: int) -> None:
        attributes = struct.pack("<IIQQQQQ", kind, _ATTRIBUTE_BYTES, event, 0, 0, 0, _INHERIT)
        number = _PERF_EVENT_OPEN.get(platform.machine())
        self._file = -1
        if number is not None and sys.platform.startswith("linux"):
            self._file = ctypes.CDLL(None).syscall(number, attributes.ljust(_ATTRIBUTE_BYTES, b"\0"), 0, -1, -1, 0)
        self.works = self._file >= 0

    def read(self) -> int:
        """Return the events so far; 0 where the machine does not count them."""
        return int.from_bytes(os.read(self._file, 8), sys.byteorder) if self.works else 0


class Phases(logging.Handler):
    """Ends a phase at each call of `end`, and at each message of the loggers that it is given to."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self._instructions = Counter(*HARDWARE_INSTRUCTIONS)
        self._before = self._now(begun=True)

    def emit(self, record: logging.LogRecord) -> None:
        self.end(record.getMessage())

    def end(self, name: str) -> None:
        """Note what was used since the phase before ended."""
        now = self._now()
        used = {key: value - self._before[key] for key, value in now.items()}
        if not self._instructions.works:
            del used["instructions"]
        self.rows.append({"phase": name, **used})
        self._before = now

    def _now(self, begun: bool = False) -> Row:
        """Return what the process and those that it waited for have used; with `begun`, nothing, so that the first
        phase has the interpreter's part."""
        own, others = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        now = {
            "faults": own.ru_minflt + others.ru_minflt,
            "from disk": own.ru_majflt + others.ru_majflt,
            "user seconds": own.ru_utime + others.ru_utime,
            "kernel seconds": own.ru_stime + others.ru_stime,
            "instructions": self._instructions.read(),
        }
        return dict.fromkeys(now, 0) if begun else now


def run(model: str, tokens: int, sequences: int) -> list[Row]:
    """Start an engine as `jpaged generate` does, generate, and return a row a phase."""
    phases = Phases()
    phases.end("interpreter")
    from jpaged import LLM, SamplingParams

    phases.end("import jpaged")
    loading = logging.getLogger("jpaged.loading.load")
    loading.setLevel(logging.DEBUG)
    loading.addHandler(phases)
    llm = LLM(model)
    phases.end("engine and pool")

    def generate(number: int, most: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}] * number, params, use_tqdm=False)

    generate(1, 1)
    phases.end("first token")
    for number in (1, sequences):
        for name in ("", ", again", ", again"):
            generate(number, tokens)
            phases.end(f"{number} x {tokens} tokens{name}")
    llm.close()
    phases.end("close")
    return phases.rows


if __name__ == "__main__":
    if sys.argv[4] == "small" and ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        raise OSError("this system has no switch that turns large pages off for a process: leave --small-pages out")
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))

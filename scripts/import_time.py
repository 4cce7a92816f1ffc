"""Measures what starting costs: CPU seconds of ``import jpaged`` and ``jpaged --help``, each in processes of its own.

    python scripts/import_time.py                        medians of nine runs, and of the interpreter alone
    python scripts/import_time.py --most 0.15 --most-help 0.4

With --most or --most-help the script fails above so many seconds, the interpreter's own included. CPU seconds depend
little on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import jpaged": ["-c", "import jpaged"],
    "jpaged --help": ["-c", "from jpaged.cli.main import run; run()", "--help"],
}
"""What is measured, as arguments of the interpreter; the last is what the command `jpaged` runs."""


def cpu_seconds(arguments: list[str]) -> float:
    """Run the interpreter once and return the CPU seconds of it and its children.

    Raises:
        RuntimeError: it failed.
    """
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{arguments} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--most", type=float, default=float("inf"), help="CPU seconds of `import jpaged`")
    parser.add_argument("--most-help", type=float, default=float("inf"), help="CPU seconds of `jpaged --help`")
    options = parser.parse_args(arguments)
    limits = {"import jpaged": options.most, "jpaged --help": options.most_help}
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(options.runs + 1):
        for name, command in COMMANDS.items():
            seconds = cpu_seconds(command)
            if turn:  # the first compiles to bytecode
                found[name].append(seconds)
    medians = {name: statistics.median(each) for name, each in found.items()}
    for name, seconds in medians.items():
        print(f"{seconds:.3f} CPU s  {name}")
    over = [name for name, limit in limits.items() if medians[name] > limit]
    for name in over:
        print(f"{name}: {medians[name]:.3f} s is more than {limits[name]:g}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())

"""The scripts' environment: what takes minutes says so while it lasts."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
set -euo pipefail
export SAY_EVERY=1
source scripts/venv.sh
work() { sleep "$1"; echo done; return "$2"; }
say_while "installing" work 2.5 0
say_while "failing" work 0 3 || echo "status $?"
say_while "waiting" work 0 4
echo "not reached"
"""


def test_a_long_command_is_named_while_it_runs_and_keeps_its_status():
    done = subprocess.run(["bash", "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 4, done.stderr
    assert done.stdout == "done\ndone\nstatus 3\ndone\n"
    assert done.stderr.startswith("still installing, 1 s so far\nstill installing, 2 s so far\n")

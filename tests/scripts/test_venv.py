"""The scripts' environment: what takes minutes says so while it lasts."""

from __future__ import annotations

import os
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
FAKE = """#!/bin/sh
echo "$@"
"""


def test_uv_is_given_what_pips_variables_say(tmp_path):
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts" / "venv.sh").write_text((ROOT / "scripts" / "venv.sh").read_text())
    (tmp_path / ".venv" / "bin" / "uv").write_text(FAKE)
    (tmp_path / ".venv" / "bin" / "uv").chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "PIP_FIND_LINKS": "wheels", "PIP_NO_INDEX": "1"}
    command = ["bash", "-euo", "pipefail", "-c", "source scripts/venv.sh; pip_install python jpaged"]
    for given, has_no_index in ((variables, True), (variables | {"PIP_NO_INDEX": "0"}, False)):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=given, timeout=60)
        assert "--find-links wheels" in done.stdout and ("--no-index" in done.stdout) is has_no_index, done.stderr


def test_a_long_command_is_named_while_it_runs_and_keeps_its_status():
    done = subprocess.run(["bash", "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 4, done.stderr
    assert done.stdout == "done\ndone\nstatus 3\ndone\n"
    assert done.stderr.startswith("still installing, 1 s so far\nstill installing, 2 s so far\n")

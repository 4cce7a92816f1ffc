"""The script that a user starts: it serves, refuses what is wrong before anything starts, and ends in good order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from live_server import SETTINGS

SCRIPT = Path(__file__).parents[3] / "scripts" / "ray" / "serve.py"
ENV = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "COLUMNS": "300", "NO_COLOR": "1"}


def command(*options):
    return [sys.executable, str(SCRIPT), *map(str, options)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--host", "0.0.0.0"), "no key"),
        (("--routing", "random"), "routing"),
        (("--engine", "{"), "--engine"),
        (("--server", '{"host": "127.0.0.2"}'), "host='127.0.0.2', and the flag for it '127.0.0.1'"),
        (("--engine", '{"max_model_len": 8}', "--max-model-len", "9"), "max_model_len=8"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(options, named):
    done = subprocess.run(command("m", *options), env=ENV, capture_output=True, text=True)
    assert done.returncode == 2 and named in done.stderr


@pytest.mark.nightly
def test_it_serves_until_it_is_told_to_end(tiny_folder):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", port, "--served-model-name", "tiny", "--engine", json.dumps(SETTINGS), "--no-warmup"]
    options += ["--max-num-seqs", 4, "--max-model-len", 128, "--kv-cache-memory-bytes", 2**23]
    process = subprocess.Popen(command(tiny_folder, *options), env=ENV, stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stdout if "is served at" in line)
        assert f"http://127.0.0.1:{port}/v1" in line
        body = {"model": "tiny", "prompt": "the cab", "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
        assert answer.json()["usage"]["completion_tokens"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()

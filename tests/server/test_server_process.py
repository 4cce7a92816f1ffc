"""The server as a process of its own: the command line, signals, and the end of its engine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent
BODY = {"prompt": "the cab", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture
def start():
    """Starts processes, and ends them with the test."""
    started = []

    def begin(*command):
        paths = [str(HERE), str(HERE.parent / "engine"), str(HERE.parent / "models")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_an_engine_that_fails_ends_the_process_and_every_client_is_told(start, tiny_folder):
    process = start(HERE / "dying_server.py", tiny_folder)
    url = process.stdout.readline().strip()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)))
    thread.start()
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as response:
        last = [line for line in response.iter_lines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
    thread.join()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "engine_stopped"
    began = time.monotonic()
    assert process.wait(20) == 70
    assert time.monotonic() - began < 10
    assert "the device fell off the bus" in process.stderr.read()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_the_command_serves_drains_on_sigterm_and_exits_with_zero(start, tiny_folder):
    options = ["--port", "0", "--no-warmup", "--dtype", "float32", "--block-size", "8", "--max-num-seqs", "4"]
    options += ["--max-num-batched-tokens", "64", "--max-model-len", "128", "--served-model-name", "tiny"]
    options += ["--kv-cache-memory-bytes", str(2**23), "--api-key", "k1"]
    process = start("-m", "jpaged.cli.main", "serve", tiny_folder, *options)
    lines = map(json.loads, process.stderr)
    url = next(line["message"] for line in lines if "is served at" in line.get("message", "")).split()[-1]
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer k1"}, timeout=60) as client:
        assert httpx.get(f"{url}/models").status_code == 401
        with client.stream("POST", "/completions", json=BODY | {"stream": True}) as response:
            text = response.iter_lines()
            next(text)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in text if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    assert process.wait(20) == 0

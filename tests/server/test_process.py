"""The server as a process of its own: the command line, signals, and the end of its engine."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from live_server import CHECKOUT, process_env

from jpaged.engine.saved_state.folder import read_state

HERE = Path(__file__).parent
AT_ONCE = 15
"""Seconds: clients of a failed engine have 5 to be told, and the machine may be busy."""
BODY = {"prompt": "the cab", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture
def start():
    """Starts processes, and ends them with the test."""
    started = []

    def begin(*command):
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=process_env(),
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_the_processes_of_these_tests_run_this_checkout(start, tmp_path, monkeypatch):
    (tmp_path / "jpaged").mkdir()
    (tmp_path / "jpaged" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    out, _ = start("-P", "-c", "import jpaged; print(jpaged.__file__)").communicate()
    assert Path(out.strip()).is_relative_to(CHECKOUT)


def test_an_engine_that_fails_ends_the_process_and_every_client_is_told(start, tiny_folder):
    process = start(HERE / "dying_server.py", tiny_folder, "fails")
    url = process.stdout.readline().strip()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)))
    thread.start()
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as response:
        last = [line for line in response.iter_lines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
    thread.join()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "engine_stopped"
    assert process.wait(AT_ONCE) == 70
    assert "the device fell off the bus" in process.stderr.read()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_second_signal_ends_a_server_whose_step_never_ends(start, tiny_folder):
    process = start(HERE / "dying_server.py", tiny_folder, "hangs")
    url = process.stdout.readline().strip()
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as response:
        lines = response.iter_lines()  # kept: where it goes, the connection does
        next(lines)
        assert process.stdout.readline() == "it hangs\n"
        process.send_signal(signal.SIGTERM)
        assert any("requests have 30 s to end" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        assert process.wait(AT_ONCE) == 70


def test_the_last_save_of_an_engine_whose_step_never_ends_is_given_up_and_the_one_before_stays(
    start, tiny_folder, tmp_path
):
    process = start(HERE / "dying_server.py", tiny_folder, "hangs", tmp_path)
    url = process.stdout.readline().strip()
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        assert process.stdout.readline() == "it hangs\n"
        stalled = httpx.get(f"{url}/health", timeout=60)
        assert (stalled.status_code, stalled.json()["error"]["code"]) == (503, "engine_stalled")
        process.send_signal(signal.SIGTERM)
        assert process.wait(AT_ONCE) == 70
    assert "the running step has not ended for 1 s" in process.stderr.read()
    assert read_state(tmp_path).host["requests"] is not None


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
    assert process.wait(120) == 0

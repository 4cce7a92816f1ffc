"""The server as a process of its own: the command line, signals, and the end of its engine."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from live_server import CHECKOUT, SECONDS, process_env, until

from jpaged import AsyncLLM
from jpaged.claims import InUse, holds_folder
from jpaged.engine.saved_state.folder import read_state
from jpaged.server.kept_state import KeptState
from jpaged.server.process import run_server
from jpaged.server.settings import ServerSettings

HERE = Path(__file__).parent
AT_ONCE = 15
"""Seconds: clients of a failed engine have 5 to be told, and the machine may be busy."""
OPTIONS = ["--port", "0", "--no-warmup", "--dtype", "float32", "--block-size", "8", "--max-num-seqs", "4"]
OPTIONS += ["--max-num-batched-tokens", "64", "--max-model-len", "128", "--served-model-name", "tiny"]
OPTIONS += ["--kv-cache-memory-bytes", str(2**23)]
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


def contents(folder):
    """Every file of a folder, with what is in it."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_server_that_is_refused_a_folder_leaves_it_and_the_killed_one_goes_on(start, tiny_folder, tmp_path):
    first = start(HERE / "dying_server.py", tiny_folder, "rests", tmp_path)
    url, mine = first.stdout.readline().strip(), {"Idempotency-Key": "mine"}
    body = BODY | {"seed": 5, "temperature": 0.8}

    def ask():
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", json=body, headers=mine, timeout=60)

    client = threading.Thread(target=ask)
    client.start()

    def is_saved():
        with contextlib.suppress(ValueError, OSError):  # a save may be replaced while it is read
            (request,) = read_state(tmp_path).host["requests"]
            return len(request["sequences"][0]["output_token_ids"]) > 20
        return False

    until(is_saved)
    time.sleep(0.2)  # nothing happens any more, so nothing is saved
    before = contents(tmp_path)
    second = start("-m", "jpaged.cli.main", "serve", tiny_folder, *OPTIONS, "--state-dir", tmp_path)
    _, said = second.communicate(timeout=SECONDS)
    assert second.returncode == 2 and f"is used by process {first.pid}: give each server a folder" in said
    assert contents(tmp_path) == before
    first.kill()
    first.wait()
    client.join()
    again = start("-m", "jpaged.cli.main", "serve", tiny_folder, *OPTIONS, "--state-dir", tmp_path)
    said = [line["message"] for line in until_served(again)]
    assert any(line.startswith("1 of 1 restored requests wait") for line in said)
    assert "the chat template shows no thoughts of earlier turns" in said
    with httpx.Client(base_url=said[-1].split()[-1], timeout=60) as http:
        texts = [http.post("/completions", json=body, headers=headers).json()["choices"] for headers in (mine, {})]
    assert texts[0] == texts[1], "what went on is what nothing has disturbed"


def until_served(process):
    """Yield the lines of a server's log until it accepts requests."""
    for line in map(json.loads, process.stderr):
        yield line
        if "is served at" in line["message"]:
            return


def raises(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("jpaged.server.process.create_app", OSError(28, "No space left on device")),
        ("jpaged.server.process.gc.freeze", KeyboardInterrupt()),
        ("uvicorn.Config.load", ValueError("no certificate")),
        ("uvicorn.Config.load", KeyboardInterrupt()),
        ("jpaged.server.settings.claim_folder", OSError(30, "Read-only file system")),
        ("jpaged.server.settings.claim_folder", InUse(Path("state"), "process 7")),
        ("jpaged.AsyncLLM.load_state", OSError(5, "Input/output error")),
        ("jpaged.AsyncLLM.load_state", KeyboardInterrupt()),
        ("jpaged.AsyncLLM.load_state", RuntimeError("not fresh")),
        ("jpaged.AsyncLLM.save_every", KeyboardInterrupt()),
        ("jpaged.server.openai.responses.store.ResponseStore.restore", OSError(5, "Input/output error")),
        ("uvicorn.Server.startup", SystemExit(1)),  # the port was taken meanwhile
        ("uvicorn.Server.startup", KeyboardInterrupt()),
    ],
)
def test_a_start_that_fails_leaves_the_saved_state_as_it_was(place, error, tiny_llm, tmp_path, monkeypatch):
    tiny_llm.save_state(tmp_path)
    before = contents(tmp_path)
    monkeypatch.setattr(place, raises(error))
    settings = ServerSettings(model="tiny", port=0, state_dir=tmp_path, save_every=1e6)
    engine = AsyncLLM.from_llm(tiny_llm)
    try:
        with pytest.raises(BaseException):  # noqa: B017  an asyncio.Runner may raise another one
            run_server(engine, settings)
    finally:
        asyncio.run(engine.shutdown())
    assert contents(tmp_path) == before


def test_a_server_that_ends_saves_before_it_lets_the_folder_go(tiny_llm, tmp_path, monkeypatch):
    held = []
    save = KeptState.save_last

    async def recorded(kept):
        held.append(holds_folder(tmp_path))
        await save(kept)
        held.append(holds_folder(tmp_path))

    monkeypatch.setattr(KeptState, "save_last", recorded)
    settings = ServerSettings(model="tiny", port=0, state_dir=tmp_path, save_every=1e6)
    engine = AsyncLLM.from_llm(tiny_llm)
    assert run_server(engine, settings, lambda url: signal.raise_signal(signal.SIGTERM)) == 0
    assert held == [True, True] and not holds_folder(tmp_path)


def test_the_command_serves_drains_on_sigterm_and_exits_with_zero(start, tiny_folder):
    process = start("-m", "jpaged.cli.main", "serve", tiny_folder, *OPTIONS, "--api-key", "k1")
    url = [line["message"] for line in until_served(process)][-1].split()[-1]
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer k1"}, timeout=60) as client:
        assert httpx.get(f"{url}/models").status_code == 401
        with client.stream("POST", "/completions", json=BODY | {"stream": True}) as response:
            text = response.iter_lines()
            next(text)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in text if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    assert process.wait(120) == 0

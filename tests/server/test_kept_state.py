"""A server whose state is kept: killed, started again, asked again, it gives the rest and loses nothing."""

from __future__ import annotations

import asyncio
import os
import threading

import httpx
import pytest
from live_server import until

from jpaged import StateRefused
from jpaged.server import kept_state
from jpaged.server.caller import AGAIN
from jpaged.server.kept_state import KeptState

PATH = "/v1/completions"
BODY = {"prompt": "the far cab", "max_tokens": 100, "ignore_eos": True, "seed": 3, "temperature": 0.8}
MINE = {"Idempotency-Key": "mine"}


class Client(threading.Thread):
    """Asks once; what comes back is in `answer`, where it comes at all."""

    def __init__(self, server, headers, **changes):
        super().__init__()
        self.answer = None
        self._ask = server.url + PATH, headers, BODY | changes
        self.start()

    def run(self):
        url, headers, body = self._ask
        try:
            self.answer = httpx.post(url, json=body, headers=headers, timeout=60)
        except httpx.HTTPError:
            return


def ask(server, headers=MINE, **changes):
    answer = server.http.post(PATH, json=BODY | changes, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.fixture
def undisturbed(serve):
    server = serve()
    text = ask(server, {})
    server.stop()
    return text


@pytest.fixture
def killed(serve, pace, undisturbed, tmp_path):
    """The folder of a server that ended in the midst of three requests, of which one had no Idempotency-Key."""
    server = serve(state_dir=tmp_path, save_every=1e6)
    pace.left = 0
    clients = [Client(server, MINE), Client(server, {}), Client(server, {"Idempotency-Key": "other"}, seed=4)]
    until(lambda: server.engine.stats().num_waiting == 3)
    pace.make(20)
    assert server.call(server.engine.save_state(tmp_path)).num_requests == 3
    server.stop()
    for client in clients:
        client.join()
    pace.go_on()
    return tmp_path


def test_who_asks_again_gets_the_answer_that_nothing_would_have_disturbed(serve, killed, undisturbed):
    server = serve(state_dir=killed)
    assert len(server.engine.restored_requests) == 2, "nobody can ask again without an Idempotency-Key"
    assert ask(server) == undisturbed
    assert len(server.engine.restored_requests) == 1
    with server.http.stream("POST", PATH, json=BODY | {"seed": 4}, headers={"Idempotency-Key": "other"}) as response:
        assert response.status_code == 200
        response.read()
    assert server.engine.restored_requests == []


def test_another_body_under_the_same_key_is_another_request(serve, killed, undisturbed):
    server = serve(state_dir=killed)
    assert len(ask(server, max_tokens=5)) < len(undisturbed)
    assert len(server.engine.restored_requests) == 2


def test_a_damaged_state_is_told_and_the_server_starts_cold(serve, killed, undisturbed, caplog):
    largest = max((file for file in killed.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    server = serve(state_dir=killed)
    assert "the saved state is refused" in caplog.text
    assert server.engine.restored_requests == [] and ask(server) == undisturbed


def test_a_server_that_is_told_to_end_saves_what_it_has_to_cut_off(serve, pace, undisturbed, tmp_path):
    server = serve(state_dir=tmp_path, drain_seconds=0.0, save_every=1e6)
    pace.left = 0
    client = Client(server, MINE)
    until(lambda: server.engine.stats().num_waiting == 1)
    pace.make(20)
    server.terminate()
    server.join()
    client.join()
    pace.go_on()
    again = serve(state_dir=tmp_path)
    assert len(again.engine.restored_requests) == 1
    assert ask(again) == undisturbed


def test_a_key_whose_request_is_running_runs_it_once(serve, pace):
    server = serve()
    pace.left = 0
    client = Client(server, MINE, max_tokens=110)
    until(lambda: server.engine.stats().num_waiting == 1)
    pace.make(5)
    refused = server.http.post(PATH, json=BODY | {"max_tokens": 110}, headers=MINE)
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "idempotency_conflict"
    pace.go_on()
    client.join()
    assert client.answer.status_code == 200
    assert ask(server, max_tokens=110) == client.answer.json()["choices"][0]["text"]


def test_a_second_server_on_one_folder_is_refused_and_names_the_first(tmp_path):
    engines = IdleEngine(), IdleEngine()

    async def run() -> None:
        first, second = (KeptState(engine, tmp_path / "state", 1e6) for engine in engines)
        await first.restore()
        with pytest.raises(StateRefused, match=rf"/state' is used by process {os.getpid()}: give each server a folder"):
            await second.restore()
        await second.save_last()
        assert engines[1].asked == []
        await first.save_last()
        await second.restore()
        second.release()

    asyncio.run(run())


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError(), KeyboardInterrupt()])
def test_a_state_that_could_not_be_read_is_not_overwritten_by_the_last_save(error, tmp_path):
    engine = IdleEngine()
    (tmp_path / "state.json").touch()

    async def fails(folder):
        raise error

    engine.load_state = fails

    async def run() -> None:
        kept = KeptState(engine, tmp_path, 1.0)
        try:
            await kept.restore()
        except BaseException as raised:
            assert raised is error
        await kept.save_last()
        kept.release()

    asyncio.run(run())
    assert engine.asked == []


class IdleEngine:
    """An engine with no state to save, or with these requests in the state that it loads; records what it is asked."""

    def __init__(self, *restored, refusal=None):
        self.restored_requests, self.refusal = list(restored), refusal
        self.asked = []

    async def save_state(self, folder):
        await asyncio.sleep(0.02)
        self.asked.append("save")
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        (folder / "state.json").touch()

    async def load_state(self, folder):
        self.asked.append("load")
        return list(self.restored_requests)

    async def abort(self, name):
        self.asked.append(f"abort {name}")
        self.restored_requests.remove(name)

    async def stop_saving(self):
        self.asked.append("stop")

    def save_every(self, folder, seconds):
        self.asked.append(f"every {seconds:g}")


def test_without_a_folder_nothing_is_saved():
    engine = IdleEngine()

    async def run() -> None:
        kept = KeptState(engine, None, 1.0)
        await kept.restore()
        await kept.save_last()
        kept.release()

    asyncio.run(run())
    assert engine.asked == []


def test_a_folder_is_saved_to_at_the_start_at_intervals_and_once_at_the_end(tmp_path):
    engine = IdleEngine()

    async def run() -> KeptState:
        kept = KeptState(engine, tmp_path / "state", 7.0)
        await kept.restore()
        first = asyncio.create_task(kept.save_last())
        await asyncio.sleep(0)
        await kept.save_last()
        assert engine.asked[-1] == "save", "the second call did not wait for the first"
        await first
        return kept

    kept = asyncio.run(run())
    assert engine.asked == ["save", "every 7", "stop", "save"] and not kept.stalled


@pytest.mark.parametrize("saved_in_time", [False, True])
def test_restored_requests_end_where_no_client_sends_them_again_in_time(saved_in_time, tmp_path, monkeypatch, caplog):
    """One has no Idempotency-Key, so that no client can; the last save ends the waiting."""
    monkeypatch.setattr(kept_state, "RESTORED_TIMEOUT", 0.05)
    engine = IdleEngine(f"{AGAIN}mine", "another")
    (tmp_path / "state.json").touch()

    async def run() -> None:
        kept = KeptState(engine, tmp_path, 7.0)
        await kept.restore()
        assert engine.asked == ["load", "abort another", "every 7"]
        if saved_in_time:
            await kept.save_last()
        await asyncio.sleep(0.2)
        kept.release()

    asyncio.run(run())
    assert engine.asked[3:] == (["stop", "save"] if saved_in_time else [f"abort {AGAIN}mine"])
    assert ("did not send it again within 0.05 s" in caplog.text) != saved_in_time


def test_an_engine_whose_state_cannot_be_saved_is_refused_and_leaves_the_folder_to_others(tmp_path):
    async def run() -> None:
        refused = KeptState(IdleEngine(refusal="replicas save no state"), tmp_path / "state", 1.0)
        with pytest.raises(StateRefused, match=r"^state_dir='.*/state': replicas save no state$"):
            await refused.restore()
        other = KeptState(IdleEngine(), tmp_path / "state", 1.0)
        await other.restore()
        other.release()

    asyncio.run(run())


def test_only_its_owner_reads_what_a_server_keeps(serve, tmp_path):
    server = serve(state_dir=tmp_path / "state", save_every=1e6)
    made = server.http.post("/v1/responses", json={"input": "a secret", "max_output_tokens": 4, "background": True})
    assert made.status_code == 200, made.text
    server.call(server.engine.save_state(tmp_path / "state"))
    server.stop()
    kept = [path for path in (tmp_path / "state").rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert {path.suffix for path in kept} >= {".json", ".events", ".msgpack"}
    assert {oct(path.stat().st_mode & 0o777) for path in kept} == {"0o600"}
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700

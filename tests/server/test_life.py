"""Clients that go away, too many of them, the end of the server and that of its engine."""

import json
import random
import shutil
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import thorough
from live_server import SECONDS, access_lines, until

from jpaged.engine.engine import Engine
from jpaged.server.access import Key, find_key, read_keys
from jpaged.server.settings import ServerSettings

PATH = "/v1/completions"
LONG = {"model": "tiny", "prompt": "the cab", "max_tokens": 110, "ignore_eos": True, "seed": 1}
TWO_STEPS = 120
"""Tokens of a prompt that takes two steps."""


def connect(server, body):
    """Send a request over a socket of its own, and read nothing."""
    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return sock


def kill(sock):
    """Close a connection as a killed process does: with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    sock.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_blocks_of_a_client_that_is_killed_are_free_without_another_step(pace, server, stream, phase):
    """The engine is held when the client is killed: were its end not noticed, the request would stay for ever."""
    draw = random.Random(f"{stream} {phase}")
    for turn in range(50 if thorough.NIGHTLY else 5):  # 200 of all kinds at night
        prompt = [9 + (turn + i) % 50 for i in range(TWO_STEPS)] if phase == "prefill" else "the cab"
        pace.left = 0
        before = server.engine.stats()
        sock = connect(server, LONG | {"prompt": prompt, "stream": stream, "n": 4, "cache_salt": str(turn)})
        until(lambda: server.engine.stats().num_waiting == 1)
        pace.make(1 if phase == "prefill" else draw.randint(4, 40))
        assert server.used_blocks() > 0  # asked between two steps
        held = server.engine.stats()
        assert held.num_running == 1
        if phase == "prefill":
            assert held.num_computed_tokens - before.num_computed_tokens < TWO_STEPS, "there is more of the prompt"
        kill(sock)
        until(lambda: server.serving.num_active == 0)
        assert server.used_blocks() == 0
        now = server.engine.stats()
        assert (now.num_steps, now.num_running) == (held.num_steps, 0)


def test_a_client_that_is_killed_while_it_waits_leaves_nothing(pace, server):
    pace.left = 0
    socks = [connect(server, LONG | {"n": 4}) for _ in range(6)]
    until(lambda: server.engine.stats().num_waiting == 6)
    pace.make(3)
    assert server.engine.stats().num_waiting == 5
    for sock in socks:
        kill(sock)
    until(lambda: server.serving.num_active == 0)
    assert server.used_blocks() == 0 and server.engine.stats().num_waiting == 0


def test_health_is_bad_while_a_step_does_not_end_though_the_process_answers(serve, monkeypatch):
    server = serve(health_timeout=0.1)
    inside, goes_on, step = threading.Event(), threading.Event(), Engine.step

    def stuck(engine):
        if engine.has_work:
            inside.set()
            goes_on.wait(SECONDS)
        return step(engine)

    monkeypatch.setattr(Engine, "step", stuck)
    thread = threading.Thread(target=server.complete)
    thread.start()
    assert inside.wait(SECONDS)
    stalled = server.http.get("/health")
    assert (stalled.status_code, stalled.json()["error"]["code"]) == (503, "engine_stalled")
    assert server.http.get("/version").status_code == 200
    goes_on.set()
    thread.join()
    until(lambda: server.http.get("/health").status_code == 200)


def test_more_than_may_wait_are_told_to_come_again(pace, serve):
    server = serve(max_waiting=2)
    pace.left = 0
    socks = [connect(server, LONG | {"n": 4, "stream": True})]
    until(lambda: server.engine.stats().num_waiting == 1)
    pace.make(3)
    socks += [connect(server, LONG | {"n": 4, "stream": True}) for _ in range(2)]
    until(lambda: server.engine.stats().num_waiting == 2)
    response = server.post(PATH, LONG)
    assert response.status_code == 429 and response.headers["Retry-After"] == "1"
    assert response.json()["error"]["code"] == "engine_busy"
    assert server.http.get("/health").status_code == 200
    for sock in socks:
        kill(sock)


def test_a_request_that_takes_too_long_is_ended(pace, serve):
    server = serve(request_timeout=0.2)
    pace.left = 0
    assert server.refusal(PATH, LONG, 504)["code"] == "request_timeout"
    pace.go_on()
    server.serving.settings = replace(server.serving.settings, request_timeout=None)
    server.answer(PATH, LONG)  # its shapes are compiled now, so that the next one's first token comes in time
    server.serving.settings = replace(server.serving.settings, request_timeout=2.0)
    pace.left = 5
    with server.http.stream("POST", PATH, json=LONG | {"stream": True}) as response:
        last = [line for line in response.iter_lines() if line][-1]
    assert '"request_timeout"' in last and response.status_code == 200
    until(lambda: server.used_blocks() == 0)


# ---------------------------------------------------------------------- ends


@pytest.fixture
def asked(pace):
    """Asks in a thread, and holds the engine when it has made a few tokens of the answer."""

    def ask(server, answers):
        pace.left = 0
        thread = threading.Thread(target=lambda: answers.append(server.post(PATH, LONG)))
        thread.start()
        until(lambda: server.engine.stats().num_waiting == 1)
        pace.make(8)
        return thread

    return ask


def test_requests_that_run_end_while_new_ones_are_turned_away(pace, server, asked):
    answers = []
    thread = asked(server, answers)
    server.terminate()
    until(lambda: server.http.get("/health").status_code == 503)
    error = server.refusal(PATH, LONG, 503)
    assert error["code"] == "draining"
    pace.go_on()
    thread.join()
    assert answers[0].status_code == 200 and answers[0].json()["choices"][0]["finish_reason"] == "length"
    server.join()


def test_requests_that_do_not_end_in_time_are_ended_with_what_they_have(serve, asked):
    server = serve(drain_seconds=0.2)
    answers = []
    thread = asked(server, answers)
    server.terminate()
    thread.join()
    choice = answers[0].json()["choices"][0]
    assert choice["finish_reason"] == "abort" and choice["text"]
    server.join()


def test_a_second_signal_ends_requests_with_what_they_have_and_says_so_once(serve, asked, caplog, monkeypatch):
    monkeypatch.setattr("jpaged.server.process._exit_after", lambda seconds: None)  # it would end the tests
    server = serve(drain_seconds=1000.0)
    answers = []
    thread = asked(server, answers)
    server.terminate()
    until(lambda: server.http.get("/health").status_code == 503)
    server.terminate()
    thread.join()
    choice = answers[0].json()["choices"][0]
    assert choice["finish_reason"] == "abort" and choice["text"]
    server.join()
    assert [record.getMessage() for record in caplog.records if "again" in record.getMessage()] == [
        "SIGTERM again: 1 requests are cut off"
    ]
    assert not any(record.exc_info for record in caplog.records)


# ---------------------------------------------------------------------- keys


@pytest.fixture
def keyed(serve):
    keys = (
        Key.of("one", "alice"),
        Key.of("two", "bob"),
        Key("carol", Key.of("three", "carol").digest, "carol", requests_per_minute=2),
        Key.of("root", "admin", admin=True),
    )
    return serve(keys=keys)


def bearer(secret):
    return {"Authorization": f"Bearer {secret}"}


def test_only_those_with_a_key_come_in(keyed):
    for headers in (
        {},
        bearer("wrong"),
        {"Authorization": "Bearer"},
        {"Authorization": "Basic one"},
        {"Authorization": "Bearer \xff"},
    ):
        for method, path in (("POST", PATH), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/openapi.json")):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            response = keyed.http.request(method, path, headers=encoded)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert keyed.http.get("/health").status_code == 200
    assert keyed.http.get("/v1/models", headers=bearer("two")).status_code == 200


def test_what_concerns_all_is_for_admins(keyed):
    assert keyed.http.get("/metrics", headers=bearer("one")).status_code == 403
    assert keyed.http.get("/metrics", headers=bearer("root")).status_code == 200


def test_whoever_opens_the_memory_page_sees_the_pool_with_an_admins_key_only(keyed):
    assert keyed.http.get("/memory").status_code == keyed.http.get("/memory/page.js").status_code == 200
    assert keyed.http.get("/memory/events").status_code == 401
    assert keyed.http.get("/memory/events", headers=bearer("one")).status_code == 403
    with keyed.http.stream("GET", "/memory/events", headers=bearer("root")) as events:
        assert next(events.iter_lines()).startswith("data: {")


def test_a_key_asks_no_oftener_than_its_rate(keyed):
    body = {"prompt": "a", "max_tokens": 1}
    codes = [keyed.http.post(PATH, json=body, headers=bearer("three")).status_code for _ in range(3)]
    assert codes == [200, 200, 429]
    late = keyed.http.post(PATH, json=body, headers=bearer("three"))
    assert 0 < int(late.headers["Retry-After"]) <= 30
    assert keyed.http.post(PATH, json=body, headers=bearer("one")).status_code == 200


def test_more_prompts_than_a_key_can_ever_have_at_once_are_refused_and_as_many_as_it_can_are_answered(serve):
    small = Key("small", Key.of("one", "small").digest, "small", share=0.05)
    server = serve(keys=(small, Key.of("two", "bob")), max_waiting=64)

    def ask(secret, count):
        body = {"prompt": [[9]] * count, "max_tokens": 1}
        return server.http.post(PATH, json=body, headers=bearer(secret))

    most = 4 + 4 + int(0.05 * 64)  # what runs, what the engine holds beside that, and the key's share of what waits
    refused = ask("one", most + 1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
    assert f"key small can have {most} at once" in refused.json()["error"]["message"]
    assert ask("one", most).status_code == ask("two", 64).status_code == 200


def test_cached_prefixes_are_not_shared_between_keys(keyed):
    def cached(secret):
        body = {"prompt": "the far cab is " * 3, "max_tokens": 1}
        response = keyed.http.post(PATH, json=body, headers=bearer(secret))
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0 and cached("one") > 0
    assert cached("two") == 0 and cached("two") > 0


def test_every_answer_has_an_id_and_every_request_a_line_without_its_prompt(server, caplog):
    with caplog.at_level("INFO", "jpaged.access"):
        named = server.http.post(
            PATH,
            json={"prompt": "secret cab", "max_tokens": 2, "ignore_eos": True, "user": "u1"},
            headers={"X-Request-Id": "mine-1"},
        )
        odd = server.http.get("/nowhere", headers={"X-Request-Id": "two words"})
        until(lambda: len(access_lines(caplog)) == 2)
    assert named.headers["X-Request-Id"] == "mine-1" and named.json()["id"].startswith("cmpl-mine-1-")
    assert odd.headers["X-Request-Id"] != "two words"
    lines = sorted(access_lines(caplog), key=lambda line: line["status"])
    assert (lines[0]["request_id"], lines[0]["status"], lines[0]["user"]) == ("mine-1", 200, "u1")
    assert lines[0]["output_tokens"] == 2 and lines[0]["prompt_tokens"] > 0
    assert lines[1]["status"] == 404 and "secret" not in caplog.text


def test_what_nobody_foresaw_is_a_500_that_tells_nothing_and_harms_nobody(server, monkeypatch, caplog):
    def broken():
        raise KeyError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "get_default_sampling_params", broken)
        response = server.post(PATH, LONG)
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text and response.headers["X-Request-Id"]
    (record,) = [one for one in caplog.records if one.getMessage() == "a request failed"]
    assert record.request_id == response.headers["X-Request-Id"]
    assert server.complete()["choices"]


def test_browsers_of_other_sites_are_kept_out_unless_named(serve):
    server = serve()
    origin = {"Origin": "https://page.example"}
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers=origin).headers
    rebound = server.http.get("/v1/models", headers={"Host": "page.example"})
    assert rebound.status_code == 400
    server.stop()
    named = serve(cors_origins=("https://page.example",))
    headers = named.http.get("/v1/models", headers=origin).headers
    assert headers["access-control-allow-origin"] == "https://page.example"


def test_pages_that_are_named_may_send_what_clients_send_and_read_what_the_gate_refuses(serve):
    server = serve(cors_origins=("https://page.example",), keys=(Key.of("one", "alice"),))
    sent = "authorization, idempotency-key, traceparent, x-stainless-os"
    wanted = {"Access-Control-Request-Method": "DELETE", "Access-Control-Request-Headers": sent}
    for origin, status, named in (
        ("https://page.example", 200, "https://page.example"),
        ("https://a.example", 400, None),
    ):
        asked = server.http.options("/v1/responses/r", headers={"Origin": origin, **wanted})
        assert (asked.status_code, asked.headers.get("access-control-allow-origin")) == (status, named)
        refused = server.http.get("/v1/models", headers={"Origin": origin})
        assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (401, named)


def test_a_certificate_makes_it_https(serve, tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = [
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        certificate,
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run([openssl, *map(str, made)], check=True, capture_output=True)
    server = serve(tls_certificate=certificate, tls_key=key)
    assert server.url.startswith("https://") and server.http.get("/health").status_code == 200


def test_settings_that_would_open_the_server_to_all_are_refused():
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):
        with pytest.raises(ValueError, match="--api-key"):
            ServerSettings(model="m", host=host)
        ServerSettings(model="m", host=host, allow_anonymous=True)
        ServerSettings(model="m", host=host, keys=(Key.of("a", "a"),))
    for host in ("127.0.0.1", "::1", "localhost"):
        ServerSettings(model="m", host=host)
    with pytest.raises(ValueError, match=r"keys=\['a'\]"):
        ServerSettings(model="m", keys=(Key.of("one", "a"), Key.of("two", "a"), Key.of("three", "b")))
    with pytest.raises(ValueError, match="together"):
        ServerSettings(model="m", tls_key=Path("key.pem"))
    with pytest.raises(ValueError, match="tool_parser='xml'"):
        ServerSettings(model="m", tool_parser="xml")


def test_a_file_of_keys_is_read_and_never_told(tmp_path):
    file = tmp_path / "keys.json"
    digest = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"  # of foo
    entries = [{"name": "a", "key": "secret", "salt": "s", "share": 0.5}, {"name": "b", "sha256": digest}]
    file.write_text(json.dumps(entries))
    a, b = read_keys(file)
    assert (a.salt, a.share, b.salt) == ("s", 0.5, "b")
    assert find_key((a, b), "foo") is b and find_key((a, b), "secret") is a and find_key((a, b), "fo") is None
    assert "secret" not in repr(a)
    for wrong in (
        [],
        {},
        [{"name": "a"}],
        [{"name": "a", "key": "secret", "x": 1}],
        [{"name": "a", "key": "secr\u00e9t"}],
        [{"name": "a", "key": "secret", "share": 2}],
        [{"name": "a", "sha256": "secret"}],
        entries[:1] * 2,
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="api-keys-file") as refused:
            read_keys(file)
        assert "secr" not in str(refused.value)
    file.write_text('{"name": "a", "key": "secret"}\n{"name": "b", "key": "secret"}\n')
    with pytest.raises(ValueError, match="must be a JSON list of keys: Extra data, line 2, column 1") as refused:
        read_keys(file)
    assert "secr" not in str(refused.value)
    with pytest.raises(ValueError, match=r"none\.json cannot be read: No such file"):
        read_keys(tmp_path / "none.json")

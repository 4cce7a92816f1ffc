"""Clients that mean harm, or speak no HTTP: each is refused or let go, and those beside it are served."""

import asyncio
import json
import resource
import socket
import struct
import time

import httpx
import pytest
from live_server import SECONDS, access_lines, until

from jpaged.server.access import Key
from jpaged.server.connections import MOST_HEAD_BYTES

PATH = "/v1/completions"
LONG = {"model": "tiny", "prompt": "the cab", "max_tokens": 110, "ignore_eos": True, "seed": 1}


def connect(server, receive_buffer=None):
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(SECONDS)
    host, port = server.url.removeprefix("http://").split(":")
    sock.connect((host, int(port)))
    return sock


def request(body, path=PATH):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def answer_to(server, sent):
    """All that comes until the server closes the connection; nothing where it resets it."""
    with connect(server) as sock:
        received = b""
        try:
            sock.sendall(sent)
            while piece := sock.recv(2**16):
                received += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
        return received


@pytest.fixture
def patient(serve):
    """A server whose patience is short."""
    return serve(read_timeout=0.5)


def check_well(server):
    """The server answers, and nothing is left of those before."""
    server.server.config.http_protocol_class.arrival_timeout = SECONDS  # this client may be slow on a busy machine
    until(lambda: server.serving.num_active == 0)
    assert server.used_blocks() == 0
    assert server.http.get("/health").json() == {"status": "ok"}


# ---------------------------------------------------------------------- slow ones


@pytest.mark.parametrize(
    "begun", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: ", request(LONG)[:-5]]
)
def test_a_request_that_never_comes_to_its_end_is_given_up(patient, begun):
    assert answer_to(patient, begun).startswith(b"HTTP/1.1 408 ")
    check_well(patient)


def test_a_head_that_comes_drop_by_drop_is_given_up_all_the_same(patient):
    with connect(patient) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:
                sock.sendall(b"X-A: b\r\n")
                time.sleep(0.05)


def test_a_request_that_waits_behind_a_long_answer_is_not_late(patient, pace):
    pace.least = 0.02
    with connect(patient) as sock:
        sock.sendall(request(LONG) + b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        received = b""
        while piece := sock.recv(2**16):
            received += piece
    assert received.count(b"HTTP/1.1 200 ") == 2 and b'"version"' in received


@pytest.fixture
def narrow():
    """A connection whose buffers hold little, in the server's system and the client's."""
    socks = []

    def open_one(server):
        socks.append(connect(server, receive_buffer=4096))
        until(lambda: server.server.server_state.connections)
        (only,) = server.server.server_state.connections
        only.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return socks[-1], only.transport

    yield open_one
    for sock in socks:
        sock.close()


def test_a_stream_that_nobody_reads_fills_a_bounded_buffer_and_is_let_go(serve, narrow, caplog):
    server = serve(stall_timeout=0.3)
    sock, transport = narrow(server)
    with caplog.at_level("INFO", "jpaged.access"):
        sock.sendall(request(LONG | {"n": 4, "logprobs": 20, "stream": True, "max_tokens": 120}))
        until(lambda: server.serving.num_active == 1)
        largest = 0
        while server.serving.num_active:
            largest = max(largest, transport.get_write_buffer_size())
            time.sleep(0.005)
        until(lambda: access_lines(caplog))
        until(lambda: not server.server.server_state.connections)
    (line,) = access_lines(caplog)
    assert (line["status"], line["error"]) == (499, "the client stopped reading")
    assert 0 < largest < 2**18, "the whole answer has half a megabyte"
    check_well(server)


def test_a_whole_answer_that_nobody_reads_is_cut_off(server, narrow):
    server.server.config.timeout_keep_alive = 0.1
    sock, transport = narrow(server)
    sock.sendall(request(LONG | {"n": 4, "logprobs": 20, "max_tokens": 120}))
    until(lambda: transport.get_write_buffer_size() > 2**16)
    until(lambda: not server.server.server_state.connections)
    check_well(server)


# ---------------------------------------------------------------------- large ones


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 2 * MOST_HEAD_BYTES + b" HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 2 * MOST_HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"a" * 2 * MOST_HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * MOST_HEAD_BYTES,
        b"GET /health HTTP/1.1\r\n" + b"Accept: text/plain\r\n" * 3000 + b"X: " + b"a" * 2**15 + b"\r\n\r\n",
    ],
)
def test_a_head_without_end_is_refused(server, head):
    answer = answer_to(server, head)
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")  # a reset may overtake the answer
    check_well(server)


def test_heads_below_the_limit_are_taken_one_after_the_other(server):
    padding = b"X: " + b"a" * (MOST_HEAD_BYTES // 2) + b"\r\n\r\n"
    with connect(server) as sock:
        for _ in range(5):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + padding)
            answer = b""
            while not answer.endswith(b"}"):
                answer += sock.recv(2**16)
            assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("depth", [90, 900, 30_000])
@pytest.mark.parametrize(
    "frame",
    [
        '{"prompt": %s}',
        '{"prompt": "a", "logit_bias": %s}',
        '{"prompt": "a", "max_tokens": 1, "response_format": {"type": "json_schema", "json_schema": {"schema": %s}}}',
        '{"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": %s}}',
    ],
)
def test_json_of_any_depth_is_answered_or_refused(server, frame, depth):
    for inner in ("[" * depth + "]" * depth, '{"not":' * depth + "{}" + "}" * depth):
        response = server.http.post(PATH, content=frame % inner, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400), response.text
        assert response.status_code == 200 or response.json()["error"]["message"]


@pytest.fixture
def many_files():
    """Room for both ends of a thousand connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    if most < 2500:
        pytest.skip(f"the system allows {most} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_connections_are_held_and_served(server, many_files):
    async def ask(reader, writer):
        writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return (await reader.readline()).startswith(b"HTTP/1.1 200 ")

    async def main():
        host, port = server.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(1000)]
        try:
            assert await asyncio.to_thread(server.complete)
            return await asyncio.gather(*(ask(*each) for each in held))
        finally:
            for _, writer in held:
                writer.close()

    assert asyncio.run(asyncio.wait_for(main(), 4 * SECONDS)) == [True] * 1000
    check_well(server)


def test_of_a_hundred_requests_at_once_those_that_may_wait_are_answered_and_the_others_told(serve, pace):
    server = serve(max_waiting=8)
    pace.left = 0
    sent = request({"prompt": "the cab", "max_tokens": 1})

    async def ask(host, port):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        status = int((await reader.readline()).split()[1])
        writer.close()
        if status == 429:
            refused.append(status)
        return status

    async def main():
        asked = asyncio.gather(*(ask(*server.url.removeprefix("http://").split(":")) for _ in range(100)))
        await asyncio.to_thread(until, lambda: len(refused) == 92)
        pace.go_on()
        return await asked

    refused = []
    statuses = asyncio.run(asyncio.wait_for(main(), 4 * SECONDS))
    assert (statuses.count(200), statuses.count(429)) == (8, 92)
    check_well(server)


@pytest.mark.parametrize("way", ["closes", "reads and closes", "resets"])
def test_a_client_that_leaves_with_thousands_of_pipelined_requests_leaves_no_traceback(server, caplog, way):
    with connect(server) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        if way == "reads and closes":
            assert sock.recv(10)
        if way == "resets":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: not server.server.server_state.connections and not server.server.server_state.tasks)
    check_well(server)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


# ---------------------------------------------------------------------- odd ones


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX\x00Y: 1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: a\nb\r\n\r\n",
        bytes(range(256)) * 4,
    ],
)
def test_what_is_no_http_is_refused(patient, sent):
    answer = answer_to(patient, sent)
    assert not answer or int(answer.split()[1]) in (400, 408, 431), answer
    check_well(patient)


@pytest.mark.parametrize("extra", [b"GET /version HTTP/1.1\r\n\r\n", b"\x00\xff" * 50, b"data: {}\n\n", b"\r\n\r\n"])
def test_what_is_sent_while_a_stream_runs_harms_none_but_its_sender(server, pace, extra):
    pace.left = 3
    with connect(server) as sock:
        sock.sendall(request(LONG | {"stream": True}))
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
        sock.sendall(extra)
        pace.go_on()
        assert len(server.complete(seed=1)["choices"]) == 1
    check_well(server)


def test_odd_headers_change_nothing(server):
    for headers in (
        {"Accept": "text/html"},
        {"Expect": "100-continue"},
        {"Last-Event-ID": "7"},
        {"X-Request-Id": "a" * 5000},
        {"Idempotency-Key": "a" * 3000},
        {"traceparent": "00-zz"},
        {"X-Bytes": b"\xff\xfe"},
    ):
        body = LONG | {"max_tokens": 2}
        assert server.http.post(PATH, json=body, headers=headers).status_code == 200, headers
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "a", "Sec-WebSocket-Version": "13"}
    assert server.http.get("/health", headers=upgrade).status_code == 200


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\x00", b"\xf4\x90\x80\x80"])
def test_bytes_that_are_no_utf8_are_refused(server, bad):
    for content in (b'{"prompt": "' + bad + b'"}', b'{"' + bad + b'": 1}', bad):
        response = server.http.post(PATH, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and response.json()["error"]["message"]
    assert server.http.get("/v1/models/" + "".join(f"%{byte:02x}" for byte in bad)).status_code == 404


# ---------------------------------------------------------------------- what a key may not see

SECRETS = ("/metrics", "/memory/events")
TRICKS = (
    "//{0}", "/./{0}", "/v1/../{0}", "/health/../{0}", "/memory/page.js/../../{0}", "/%2e/{0}", "/health/%2e%2e/{0}",
    "/{0}/", "/{0}//", "/{0}%2f", "/{0}%00", "/{0};a=b", "/{0}?x", "/{0}#x", "/{0}%20", "/{0}.", "/{1}", "/{2}",
    "http://localhost/{0}", "http://localhost/health/../{0}", "\\{0}", "/health?/{0}",
)  # fmt: skip


def get(server, target, key=None):
    """A GET with just this target, which no client has tidied."""
    with connect(server) as sock:
        secret = "" if key is None else f"Authorization: Bearer {key}\r\n"
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n{secret}\r\n".encode())
        return sock.recv(4096)


def test_no_spelling_of_a_path_opens_what_is_for_admins(serve):
    server = serve(keys=(Key.of("one", "alice"), Key.of("root", "admin", admin=True)))
    for path in SECRETS:
        assert get(server, path, "root").startswith(b"HTTP/1.1 200 ")
        first = path[1:]
        coded = "".join(f"%{ord(letter):02x}" for letter in first)
        for trick in TRICKS:
            for key in (None, "one"):
                answer = get(server, trick.format(first, coded, first.upper()), key)
                status = int(answer.split()[1])
                assert b"jpaged:" not in answer and b"data: {" not in answer, trick
                assert status in (400, 401, 403, 404, 307) or trick.startswith("/health"), (trick, answer)


def test_a_path_the_server_is_mounted_at_opens_nothing_that_is_for_admins(serve):
    server = serve(keys=(Key.of("one", "alice"), Key.of("root", "admin", admin=True)))

    async def status(path, key, root_path="/llm"):
        transport = httpx.ASGITransport(server.app, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.get(path, headers=bearer(key) if key else {})).status_code

    for path, key, want in (
        ("/llm/metrics", "one", 403),
        ("/metrics", "one", 403),
        ("/llm/memory/events", "one", 403),
        ("/llm/metrics", "root", 200),
        ("/llm/health", None, 200),
        ("/llm/llm/health", None, 401),
        ("/llmetrics", "one", 404),
    ):
        assert server.call(status(path, key)) == want, (path, key)


def test_a_file_of_the_machine_is_on_no_path(server):
    for target in (
        "/../../../../etc/passwd",
        "/memory/../../../etc/passwd",
        "/memory/page.js%00",
        "/memory/%2e%2e/app.py",
    ):
        assert b" 404 " in get(server, target).split(b"\r\n")[0]


def test_the_same_ids_under_two_keys_are_two_requests(serve, pace):
    """Neither X-Request-Id nor Idempotency-Key lets one key reach, stop or notice what another runs."""
    server = serve(keys=(Key.of("one", "alice"), Key.of("two", "bob")))
    names = {"X-Request-Id": "same", "Idempotency-Key": "same"}
    pace.left = 3
    with server.http.stream("POST", PATH, json=LONG | {"stream": True}, headers=names | bearer("one")) as stream:
        lines = stream.iter_lines()
        next(lines)
        pace.go_on()
        other = server.http.post(PATH, json=LONG, headers=names | bearer("two"))
        assert other.status_code == 200
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"length"' in rest[-2]


def bearer(secret):
    return {"Authorization": f"Bearer {secret}"}


def test_numbers_that_a_key_may_see_name_no_other(serve, pace):
    server = serve(keys=(Key.of("one", "alice"), Key.of("two", "bob")))
    pace.left = 3
    with server.http.stream("POST", PATH, json=LONG | {"stream": True}, headers=bearer("one")):
        for path in ("/v1/load", "/v1/models", "/version"):
            text = server.http.get(path, headers=bearer("two")).text
            assert "alice" not in text and "cab" not in text
        pace.go_on()

"""The server holds to its own OpenAPI document: cases drawn from it end as it says, in time, and leave nothing.

120 cases, the same ones each time; 20,000 new ones with ``--nightly``. Nightly, some of them are sent again and again
too: the memory that the last rounds add to the rounds before is what the server does not release.
"""

import asyncio
import gc
import importlib
import logging
import tracemalloc
from pathlib import Path

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live_server import until
from thorough import NIGHTLY

import jpaged

schemathesis = pytest.importorskip("schemathesis")

CASES = 20_000 if NIGHTLY else 120
CASE_TIMEOUT = 300
"""Seconds after which a case hangs: on a machine with ten times its work to do an answer takes half a minute."""
LOOKS = 10 if NIGHTLY else 4
"""Cases of a path that has a name in it and takes no body; one without any has one case."""
AGAIN = 30
"""Cases that are sent again."""
ROUNDS = 9
"""Times that they are, in three parts: the first lets what is cached be replaced, the others are compared. Of each part
the round counts that left the least: how much the few responses that are stored hold differs from round to round."""
MOST_KEPT = 256
"""Bytes a case that may stay: a body that is kept by mistake is more."""
DOCUMENTED = [
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_headers_conformance,
    schemathesis.checks.response_schema_conformance,
]
ASKED = {
    "model": "tiny",
    "prompt": "a b",
    "messages": [{"role": "user", "content": "a"}],
    "input": "a b",
    "tokens": [5, 6],
    "text_1": "a",
    "text_2": "b",
    "query": "a",
    "documents": ["a", "b"],
}
"""What a path is asked with, in values that can be answered."""
SERVING = ("jpaged", "starlette", "fastapi", "uvicorn", "pydantic", "anyio", "asyncio", "json", "prometheus_client")
"""Packages whose code runs in the server."""


def cases(operation):
    """Cases that keep to the document and cases that break it. Of some bodies a few fields are left out, and most name
    the model that is there; half of them ask with `ASKED`, and keep two other fields at most."""
    ways = st.one_of(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)

    @st.composite
    def drawn(draw):
        case = draw(ways)
        if isinstance(case.body, dict) and case.body:
            names = st.sampled_from(sorted(case.body))
            if draw(st.booleans()):
                kept = draw(st.sets(names, max_size=2))
                case.body = {
                    name: ASKED.get(name, case.body[name]) for name in case.body if name in kept | ASKED.keys()
                }
            else:
                for name in draw(st.sets(names)):
                    del case.body[name]
            if draw(st.integers(0, 3)):
                case.body["model"] = "tiny"
        return case

    return drawn()


def held():
    """Bytes that the server's code has asked for since the tracing began and not given back. Those of `jpaged.memory`
    are left out: cached blocks have names until the pool is full, and `used_blocks` tells of those kept by mistake."""
    gc.collect()
    folders = [Path(importlib.import_module(package).__file__).parent for package in SERVING]
    ours = [tracemalloc.Filter(True, f"{folder}/*") for folder in folders]
    cached = tracemalloc.Filter(False, f"{Path(jpaged.__file__).parent}/memory/*")
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([*ours, cached]).traces)


def num_tasks(server):
    """Tasks of the server's loop."""

    async def count():
        return len(asyncio.all_tasks())

    return server.call(count())


def statuses_of(operation, number, sent):
    """Send so many cases, and note the requests; the statuses of their answers, none the server's fault."""
    statuses = set()

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=not NIGHTLY,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(operation))
    def send_all(case):
        response = case.call(timeout=CASE_TIMEOUT)
        case.validate_response(response, checks=DOCUMENTED)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert response.json()["error"]["message"]
        statuses.add(response.status_code)
        sent.append(response.request)

    send_all()
    return statuses


def unpin(server):
    """End the pins that cases asked for, which hold blocks for minutes."""
    for pin in server.http.get("/v1/cache/pins").json()["data"]:
        server.http.delete(f"/v1/cache/pins/{pin['id']}")


def left_behind(server, sent):
    """Bytes and tasks that are there when all requests have been sent once more, and answered."""
    with requests.Session() as session:
        for request in sent:
            session.send(request, timeout=CASE_TIMEOUT)
    until(lambda: server.serving.num_active == 0)
    unpin(server)
    assert server.used_blocks() == 0
    return held(), num_tasks(server)


@pytest.fixture
def traced():
    """Lets a test trace memory; nothing is logged meanwhile, as pytest keeps every line until the test ends."""
    logging.disable(logging.CRITICAL)
    yield
    tracemalloc.stop()
    logging.disable(logging.NOTSET)


@pytest.fixture
def operations(serve):
    """The server and the operations of its document, those whose bodies are drawn last."""

    def found(**settings):
        server = serve(**settings)
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [operation.ok() for operation in document.get_all_operations()]
        assert sum(map(has_body, operations)) >= 5, "these are the paths to try"
        return server, sorted(operations, key=has_body)

    return found


def has_body(operation):
    return operation.method == "post" and "{" not in operation.path


def send_cases(server, operations, cases):
    """Send so many cases in all; the requests that were sent."""
    sent, of_bodies = [], []
    for operation in operations:
        number = (cases - LOOKS) // sum(map(has_body, operations)) if has_body(operation) else LOOKS
        statuses = statuses_of(operation, number, sent)
        if has_body(operation):
            of_bodies.append(statuses)
        until(lambda: server.serving.num_active == 0)
        unpin(server)
        assert server.used_blocks() == 0
    for status, least in ((200, 2 / 3), (400, 1)):
        share = sum(status in statuses for statuses in of_bodies) / len(of_bodies)
        assert share >= least, f"cases of {share:.0%} of the paths ended with {status}"
    return sent


def test_no_case_of_the_document_fails_or_hangs(operations):
    server, found = operations()
    assert len(send_cases(server, found, CASES)) >= CASES // 2


@pytest.mark.nightly
def test_no_case_of_the_document_leaves_anything_behind(operations, traced):
    server, found = operations(max_stored_responses=4)  # what is kept on purpose is soon as much as it ever is
    tracemalloc.start()  # now: what is bounded, as names of cached blocks, is full of what is traced in the end
    sent = send_cases(server, found, 280)
    again = sent[:: len(sent) // AGAIN]
    left = [left_behind(server, again) for _ in range(ROUNDS)]
    before, after = left[ROUNDS // 3 : 2 * ROUNDS // 3], left[2 * ROUNDS // 3 :]
    kept = min(size for size, _ in after) - min(size for size, _ in before)
    assert kept < MOST_KEPT * len(again) * len(after), f"memory should be flat: {left}"
    assert min(tasks for _, tasks in after) <= min(tasks for _, tasks in before)

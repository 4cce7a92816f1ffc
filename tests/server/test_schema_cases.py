"""The server holds to its own OpenAPI document: cases drawn from it end without a 5xx, in time, and leave nothing.

1,000 cases, the same ones each time; 20,000 new ones with ``--nightly``. They are sent in two halves: what the second
leaves behind beside the first is what the server does not let go of.
"""

import asyncio
import gc
import importlib
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from live_server import SECONDS, until
from thorough import NIGHTLY

schemathesis = pytest.importorskip("schemathesis")

CASES = 20_000 if NIGHTLY else 1000
PATIENCE = 10 * SECONDS
"""Seconds after which a case hangs: on a machine with ten times its work to do an answer takes half a minute."""
LOOKS = 10
"""Cases of a path that has a name in it and takes no body; one without any has one case."""
MOST_KEPT = 512
"""Bytes a case that may stay: all of a body that is kept by mistake is more."""
SERVING = ("jpaged", "starlette", "fastapi", "uvicorn", "pydantic", "anyio", "asyncio", "json", "prometheus_client")
"""Packages whose code runs in the server."""


def cases(operation):
    """Cases that keep to the document and cases that break it; of some bodies a few fields are left out, and most name
    the model that is there."""
    ways = st.one_of(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)

    @st.composite
    def drawn(draw):
        case = draw(ways)
        if isinstance(case.body, dict) and case.body:
            for name in draw(st.sets(st.sampled_from(sorted(case.body)))):
                del case.body[name]
            if draw(st.integers(0, 3)):
                case.body["model"] = "tiny"
        return case

    return drawn()


def held():
    """Bytes that the server's code has asked for since the first half began and not given back."""
    gc.collect()
    folders = [Path(importlib.import_module(package).__file__).parent for package in SERVING]
    ours = [tracemalloc.Filter(True, f"{folder}/*") for folder in folders]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)


def num_tasks(server):
    """Tasks of the server's loop."""

    async def count():
        return len(asyncio.all_tasks())

    return server.call(count())


def statuses_of(operation, number, half):
    """Send so many cases of a half; the statuses of their answers, none of which may be the server's fault."""
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
        response = case.call(timeout=PATIENCE)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert response.json()["error"]["message"]
        statuses.add(response.status_code)

    (send_all if NIGHTLY else seed(half)(send_all))()
    return statuses


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_no_case_of_the_document_fails_hangs_or_leaves_anything_behind(serve, traced):
    server = serve(max_stored_responses=8)  # what is kept on purpose is as much after both halves
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    bodies = [operation for operation in operations if operation.method == "post" and "{" not in operation.path]
    assert len(bodies) >= 5, "these are the paths to try"
    sent = [(operation, (CASES - LOOKS) // len(bodies) if operation in bodies else LOOKS) for operation in operations]
    statuses, left = {operation.label: set() for operation in operations}, []
    for half in range(2):
        for operation, number in sent:
            statuses[operation.label] |= statuses_of(operation, number // 2, half)
            until(lambda: server.serving.num_active == 0)
            assert server.used_blocks() == 0
        left.append((held(), num_tasks(server)))
    for operation in bodies:
        assert {200, 400} <= statuses[operation.label], "cases should come through, and be refused"
    (bytes_before, tasks_before), (bytes_after, tasks_after) = left
    assert bytes_after - bytes_before < MOST_KEPT * CASES / 2, "memory should be flat"
    assert tasks_after <= tasks_before

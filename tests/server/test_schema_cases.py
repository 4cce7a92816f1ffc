"""The server holds to its own OpenAPI document: cases drawn from it end without a 5xx, in time, and leave nothing.

1,000 cases, the same ones each time (26 s of CPU); 20,000 new ones with ``--nightly``.
"""

import gc

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live_server import SECONDS, until
from thorough import NIGHTLY

schemathesis = pytest.importorskip("schemathesis")

CASES = 20_000 if NIGHTLY else 1000
PATIENCE = 10 * SECONDS
"""Seconds after which a case hangs: on a machine with ten times its work to do an answer takes half a minute."""
LOOKS = 10
"""Cases of a path that has a name in it and takes no body; one without any has one case."""


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


def living():
    """How many objects of jpaged there are."""
    gc.collect()
    return sum(str(type(each).__module__).startswith("jpaged") for each in gc.get_objects())


def statuses_of(operation, number):
    """Send so many cases; the statuses of their answers, none of which may be the server's fault."""
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

    send_all()
    return statuses


def test_no_case_of_the_document_fails_hangs_or_leaves_anything_behind(server):
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    bodies = [operation for operation in operations if operation.method == "post" and "{" not in operation.path]
    assert len(bodies) >= 5, "these are the paths to try"
    before = 0
    for operation in sorted(operations, key=bodies.__contains__):
        number = (CASES - LOOKS) // len(bodies) if operation in bodies else LOOKS
        statuses = statuses_of(operation, number)
        assert operation not in bodies or {200, 400} <= statuses, "cases should come through, and be refused"
        until(lambda: server.serving.num_active == 0)
        assert server.used_blocks() == 0
        before = before or living()
    assert living() < before + 5000, "memory should be flat"

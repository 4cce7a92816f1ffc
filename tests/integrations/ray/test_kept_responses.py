"""Requests about a kept response go to the replica that keeps it, or a client is told that it is gone."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from scripted_replicas import DIED, DIED_AT_ONCE, Several, refusal, whole

from jpaged.integrations.ray.front import Front
from jpaged.integrations.ray.hints import Need, need_of
from jpaged.server.openai.bodies.responses import keeper_of, new_response_id

PATH = "/v1/responses"
MINE = new_response_id("r-1", "b")
BEHIND = {"input": "x" * 1000, "previous_response_id": MINE}
ABOUT = [
    ("GET", f"{PATH}/{MINE}?stream=true&starting_after=3", {}),
    ("GET", f"{PATH}/{MINE}/input_items", {}),
    ("POST", f"{PATH}/{MINE}/cancel", {}),
    ("DELETE", f"{PATH}/{MINE}", {}),
    ("POST", PATH, BEHIND),
]


def ask(replicas, method, path, body):
    async def go():
        transport = httpx.ASGITransport(Front(replicas))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            return await http.request(method, path, json=body)

    return asyncio.run(go())


@pytest.mark.parametrize(("method", "path", "body"), ABOUT)
def test_the_replica_that_keeps_a_response_is_asked_about_it(method, path, body):
    replicas = Several(a=whole(b"of a"), b=whole(b"of b"))
    assert ask(replicas, method, path, body).content == b"of b"
    assert [name for name, _ in replicas.asked] == ["b"]


@pytest.mark.parametrize(("method", "path", "body"), ABOUT)
@pytest.mark.parametrize("end", [[DIED], [DIED_AT_ONCE]])
def test_where_it_ends_the_client_is_told_that_the_response_is_lost(method, path, body, end):
    answer = ask(Several(a=whole(b"of a"), b=end), method, path, body)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("replica_lost", "server_error") and error["param"].endswith("response_id")


@pytest.mark.parametrize("said", [refusal(429, "engine_busy"), refusal(503, "draining")])
def test_what_it_refuses_is_refused_as_no_other_has_the_response(said):
    replicas = Several(a=whole(b"of a"), b=said)
    answer = ask(replicas, *ABOUT[-1])
    assert answer.content == said[1]["body"] and len(replicas.asked) == 1


def test_where_it_is_gone_another_replica_says_so():
    """Its 404 is made by `ResponseStore.find`."""
    answer = ask(Several(a=refusal(404, "replica_lost")), "GET", f"{PATH}/{MINE}", {})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "replica_lost"


@pytest.mark.parametrize(
    ("path", "body", "need"),
    [
        (f"{PATH}/resp_none", b"", Need(None, "response_id")),
        (f"{PATH}/{MINE}/cancel", b"no JSON", Need("b", "response_id")),
        (PATH, json.dumps(BEHIND | {"background": True}).encode(), Need("b", "previous_response_id")),
        (PATH, b'{"background": true}', Need()),
        (PATH, b'{"background": false, "previous_response_id": null}', Need()),
        (PATH, b'{"previous_response_id": 3}', Need()),
        (PATH, b"[]", Need()),
        (PATH, b"{", Need()),
        ("/v1/completions", json.dumps(BEHIND).encode(), Need()),
        ("/v1/responses_of_mine", b"{}", Need()),
    ],
)
def test_what_a_request_needs(path, body, need):
    assert need_of(path, body) == need


@pytest.mark.parametrize("request_id", ["1", "a-b", "-", ":" * 128, "resp_c-d"])
def test_whatever_a_client_calls_its_request_the_id_names_the_replica(request_id):
    assert keeper_of(new_response_id(request_id, "x7k2m9qa")) == "x7k2m9qa"
    assert new_response_id(request_id) == f"resp_{request_id}"

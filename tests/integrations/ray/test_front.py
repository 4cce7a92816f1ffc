"""The front between clients and replicas: who answers where a replica ends or refuses, and what a client is told."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError
from scripted_replicas import DIED, DIED_AT_ONCE, Call, Replicas, Several, piece, refusal, start, whole

from jpaged.integrations.ray import every_replica
from jpaged.integrations.ray.front import ATTEMPTS, NAMED, Front
from jpaged.server.streaming import event

PATH = "/v1/completions"
BODY = {"prompt": "x" * 1000}


STREAM = start(kind=b"text/event-stream; charset=utf-8")


def ask(replicas, path=PATH, body=BODY, raises=False, **options):
    async def post():
        transport = httpx.ASGITransport(Front(replicas), raise_app_exceptions=raises)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            return await http.post(path, json=body, **options)

    return asyncio.run(post())


def test_an_answer_comes_through_as_it_is_with_the_name_of_who_gave_it():
    replicas = Replicas(whole())
    answer = ask(replicas, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.json(), answer.headers[NAMED]) == (200, {"ok": 1}, "r1")
    hint, scope, body = replicas.asked[0]
    assert (scope["path"], scope["method"], json.loads(body)) == (PATH, "POST", BODY)
    assert (b"x-request-id", b"mine") in scope["headers"] and len(hint.chain) == 3


@pytest.mark.parametrize(
    "script", [[DIED_AT_ONCE], [DIED], [STREAM, DIED], refusal(503, "engine_stopped"), refusal(429, "engine_busy")]
)
def test_what_had_not_begun_is_answered_by_another_replica(script):
    replicas = Replicas(script, whole())
    assert ask(replicas).json() == {"ok": 1}
    assert replicas.asked[1][0].avoid == (set() if script == [DIED_AT_ONCE] else {"r1"})
    assert replicas.num_cancelled == 2


def test_a_stream_that_had_begun_ends_with_an_error_that_says_so():
    replicas = Replicas([STREAM, piece(event({"n": 1}), more=True), DIED])
    first, last = [line for line in ask(replicas).text.split("\n\n") if line]
    assert json.loads(first.removeprefix("data: ")) == {"n": 1}
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("replica_lost", "server_error")
    assert len(replicas.asked) == 1


def test_where_all_refuse_the_client_is_told_what_the_last_one_said():
    replicas = Replicas(*([refusal(429, "engine_busy")] * ATTEMPTS))
    answer = ask(replicas)
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "engine_busy"
    assert replicas.asked[-1][0].avoid == {"r1", "r2", "r3"}


def test_where_all_end_the_client_is_told():
    answer = ask(Replicas(*([[DIED]] * ATTEMPTS)))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"
    assert answer.headers["retry-after"] == "5"


@pytest.mark.parametrize(
    "script", [refusal(429, "rate_limited"), refusal(400, "engine_busy"), whole(b"no JSON", 503), whole(b"[]", 429)]
)
def test_other_refusals_are_the_answer(script):
    replicas = Replicas(script)
    answer = ask(replicas)
    assert answer.status_code == script[0]["status"] and answer.content == script[1]["body"]
    assert len(replicas.asked) == 1


def test_where_serve_itself_takes_no_more_the_status_is_429():
    answer = ask(Replicas([BackPressureError(num_queued_requests=1, max_queued_requests=1)]))
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "engine_busy"


def test_what_nobody_foresaw_has_the_shape_of_all_errors_and_tells_nothing_of_itself():
    answer = ask(Replicas([RuntimeError("a secret")]))
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    in_a_stream = ask(Replicas([STREAM, piece(b"data: 1\n\n", more=True), RuntimeError("a secret")])).text
    assert '"internal_error"' in in_a_stream and "secret" not in in_a_stream


def test_half_a_whole_answer_breaks_the_connection():
    with pytest.raises(ActorDiedError):
        ask(Replicas([start(), piece(b'{"ok"', more=True), DIED]), raises=True)


def test_keys_of_two_callers_share_no_prefix():
    replicas = Replicas(whole(), whole(), whole())
    for key in ("a", "a", "b"):
        ask(replicas, headers={"Authorization": f"Bearer {key}"})
    one, same, other = [hint.chain for hint, _, _ in replicas.asked]
    assert one == same and not set(one) & set(other)


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_goes_away_cancels_the_replicas_call(begun):
    async def go_away():
        script = [STREAM, piece(b"data: 1\n\n", more=True)] if begun else []
        replicas = Replicas([*script, asyncio.Event()])
        parts = iter([{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}])
        sent = []

        async def receive():
            part = next(parts)
            if part["type"] == "http.disconnect":
                while len(sent) < 2 * begun or not replicas.asked:
                    await asyncio.sleep(0)
            return part

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
        await asyncio.wait_for(Front(replicas)(scope, receive, send), 10)
        return replicas.num_cancelled

    assert asyncio.run(go_away()) == 1


def get(replicas, path):
    async def go():
        transport = httpx.ASGITransport(Front(replicas))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            return await http.get(path)

    return asyncio.run(go())


def numbers(running, tokens):
    registry = CollectorRegistry()
    Gauge("jpaged:num_requests_running", "Running.", ["model_name"], registry=registry).labels("m").set(running)
    Counter("jpaged:generation_tokens", "Tokens.", ["model_name"], registry=registry).labels("m").inc(tokens)
    Histogram("jpaged:seconds", "Seconds.", registry=registry, buckets=(1,)).observe(running)
    return whole(generate_latest(registry))


def test_metrics_are_those_of_every_replica_each_under_its_name():
    replicas = Several(a=numbers(1, 10), b=numbers(2, 20))
    answer = get(replicas, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["jpaged:num_requests_running", "m", "a"] == 1 and found["jpaged:num_requests_running", "m", "b"] == 2
    assert found["jpaged:generation_tokens_total", "m", "b"] == 20 and found["jpaged:seconds_count", "a"] == 1
    assert found["jpaged:replicas_told", "true"] == 2
    assert [name for name, _ in replicas.asked] == ["a", "b", "a"] and replicas.num_cancelled == 3


def test_a_replica_that_takes_no_question_is_missing_and_the_metrics_say_so(monkeypatch):
    monkeypatch.setattr(every_replica, "ANSWER_TIMEOUT", 0.2)
    answer = get(Several(a=numbers(1, 10), full=[asyncio.Event()]), "/metrics")
    assert 'jpaged:replicas_told{all="false"} 1.0' in answer.text and 'replica="a"' in answer.text


def test_metrics_without_an_admins_key_are_refused_as_a_replica_refuses_them():
    answer = get(Several(a=refusal(401, "invalid_api_key")), "/metrics")
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


def test_the_memory_is_that_of_the_replica_which_is_named():
    replicas = Several(a=whole(b"of a"), b=whole(b"of b"))
    assert get(replicas, "/memory/events?server=b&replica=0").content == b"of b"
    assert replicas.asked[-1] == ("b", "/memory/events")
    for query, told in (("", "several replicas"), ("?server=c", "server=c is not one")):
        answer = get(replicas, f"/memory/events{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "server"
        assert told in answer.json()["error"]["message"] and "a, b" in answer.json()["error"]["message"]
    assert get(Several(a=whole(b"of a")), "/memory/events").content == b"of a"


@pytest.mark.parametrize(("script", "code"), [([DIED], "replica_lost"), (refusal(503, "draining"), "draining")])
def test_where_the_replica_whose_memory_is_asked_for_does_not_answer_the_client_is_told(script, code):
    class Forgetful(Several):
        def remote(self, hint, scope, body):
            call = super().remote(hint, scope, body)
            return Call(self, script, "a") if scope["path"] == "/memory/events" else call

    answer = get(Forgetful(a=whole()), "/memory/events?server=a")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == code


def test_a_front_below_a_prefix_knows_its_paths_without_it():
    replicas, keeper = Several(a=numbers(1, 10), b=numbers(2, 20)), Replicas(whole(), whole())

    async def go():
        for asked, method, path in ((replicas, "GET", "/llm/metrics"), (keeper, "POST", f"/llm{PATH}")):
            transport = httpx.ASGITransport(Front(asked), root_path="/llm")
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
                answers.append(await http.request(method, path, json=BODY))

    answers = []
    asyncio.run(go())
    assert 'replica="a"' in answers[0].text and 'replica="b"' in answers[0].text
    assert len(keeper.asked[0][0].chain) == 3


WELL, STALLED = whole(b'{"status":"ok"}'), refusal(503, "engine_stalled")


@pytest.mark.parametrize(
    ("scripts", "status", "said", "of_each"),
    [
        ({"a": WELL, "b": WELL}, 200, "ok", {"a": "ok", "b": "ok"}),
        ({"a": STALLED, "b": WELL}, 200, "degraded", {"a": "engine_stalled", "b": "ok"}),
        ({"a": [asyncio.Event()], "b": WELL}, 200, "degraded", {"a": "no_answer", "b": "ok"}),
        ({"a": STALLED, "b": [asyncio.Event()]}, 503, "failed", {"a": "engine_stalled", "b": "no_answer"}),
        ({"a": [asyncio.Event()]}, 503, "failed", {"a": "no_answer"}),
        ({"a": whole(b"no JSON", 502)}, 503, "failed", {"a": "502"}),
    ],
)
def test_health_is_that_of_every_replica_and_bad_only_where_none_takes_requests(
    monkeypatch, scripts, status, said, of_each
):
    monkeypatch.setattr(every_replica, "ANSWER_TIMEOUT", 0.2)
    answer = get(Several(**scripts), "/health")
    assert (answer.status_code, answer.json()) == (status, {"status": said, "replicas": of_each})


def test_where_no_replica_takes_the_question_health_is_bad():
    answer = get(Several(a=[DIED_AT_ONCE]), "/health")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"


def load_of(running, usage, draining=False):
    body = {"active": running + 1, "running": running, "waiting": 1, "swapped": 0, "kv_cache_usage": usage}
    return whole(json.dumps(body | {"max_waiting": 256, "draining": draining}).encode())


def test_the_load_is_that_of_all_replicas_together_and_of_each(monkeypatch):
    monkeypatch.setattr(every_replica, "ANSWER_TIMEOUT", 0.2)
    found = get(Several(a=load_of(3, 0.5), b=load_of(1, 0.1, draining=True)), "/v1/load").json()
    own = found.pop("replicas")
    assert (own["a"]["running"], own["b"]["running"]) == (3, 1)
    assert found.pop("kv_cache_usage") == pytest.approx(0.3)
    assert found == {
        "active": 6,
        "running": 4,
        "waiting": 2,
        "swapped": 0,
        "max_waiting": 512,
        "draining": False,
        "whole": True,
    }
    part = get(Several(a=[asyncio.Event()], b=load_of(1, 0.1)), "/v1/load").json()
    assert (part["running"], part["whole"], [*part["replicas"]]) == (1, False, ["b"])


def test_the_load_without_a_key_is_refused_as_a_replica_refuses_it():
    assert get(Several(a=refusal(401, "invalid_api_key")), "/v1/load").status_code == 401

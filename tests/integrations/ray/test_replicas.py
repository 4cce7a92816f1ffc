"""Two replicas of a tiny model on a cluster of this machine: what they answer, and what is lost with one of them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
from live_server import SETTINGS
from local_cluster import SECONDS, Cluster, until

from jpaged import LLM, SamplingParams
from jpaged.integrations.ray import RayArguments
from jpaged.integrations.ray.front import NAMED

PATH = "/v1/completions"
ENGINE = SETTINGS | {"kv_cache_memory_bytes": 2**27, "max_model_len": 8192, "deterministic": True}
"""Rounding that depended on the batch would make another token of a near tie."""
PLACES = ENGINE["max_num_seqs"]


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """The tiny model, with room for answers that take long."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path_factory.mktemp("long") / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder):
    """One engine by itself, with the replicas' settings."""
    return LLM(folder, **ENGINE)


@pytest.fixture(scope="module")
def cluster(folder):
    cluster = Cluster()
    try:
        cluster.deploy(arguments(folder, min_replicas=2))
        yield cluster
    finally:
        cluster.stop()


def arguments(folder, **more):
    return RayArguments(
        model=folder, engine=ENGINE, server={"model": "tiny"}, warmup=False, **({"max_replicas": 2} | more)
    )


def body(i, **more):
    asked = {"model": "tiny", "prompt": f"the cab {i}", "max_tokens": 12, "seed": i, "temperature": 0.8 * (i % 2)}
    return asked | {"ignore_eos": True, "return_token_ids": True} | more


def tokens_of_one_engine(llm, bodies):
    params = [
        SamplingParams(max_tokens=one["max_tokens"], seed=one["seed"], temperature=one["temperature"], ignore_eos=True)
        for one in bodies
    ]
    return [output.outputs[0].token_ids for output in llm.generate([one["prompt"] for one in bodies], params)]


class Stream:
    """A streamed answer, read as far as it has come."""

    def __init__(self, response):
        self.response = response
        self.replica = response.headers[NAMED]
        self._events = (line.removeprefix("data: ") async for line in response.aiter_lines() if line)

    async def event(self):
        """The next event's data; None at the stream's end."""
        text = await anext(self._events, "[DONE]")
        return None if text == "[DONE]" else json.loads(text)

    async def rest(self):
        events = []
        while (event := await self.event()) is not None:
            events.append(event)
        return events


async def begin(http, one):
    request = http.build_request("POST", PATH, json=one | {"stream": True})
    stream = Stream(await http.send(request, stream=True))
    await stream.event()
    return stream


def test_two_replicas_give_the_tokens_of_one_engine(cluster, llm):
    bodies = [body(i) for i in range(6)]

    async def ask():
        async with httpx.AsyncClient(base_url=cluster.url, timeout=SECONDS) as http:
            answers = await asyncio.gather(*(http.post(PATH, json=one) for one in bodies))
            streams = [await begin(http, one | {"stream_options": {"include_usage": True}}) for one in bodies[:2]]
            return answers, [await stream.rest() for stream in streams]

    answers, streams = asyncio.run(ask())
    expected = tokens_of_one_engine(llm, bodies)
    assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == expected
    assert len({answer.headers[NAMED] for answer in answers}) == 2
    assert [events[-1]["usage"]["completion_tokens"] for events in streams] == [12, 12]
    health = cluster.health()
    assert health["status"] == "ok" and list(health["replicas"].values()) == ["ok", "ok"]
    assert cluster.post({"prompt": "a", "colour": 1}).json()["error"]["code"] == "unknown_parameter"
    refused = cluster.post({"prompt": "a" * 2**23}).json()["error"]["message"]
    assert refused == "the body is larger than the limit of 8388608 bytes"


def test_metrics_are_those_of_both_replicas_and_each_tells_of_its_own_memory(cluster):
    text = httpx.get(f"{cluster.url}/metrics", timeout=SECONDS).text
    names = set(re.findall(r'jpaged:num_requests_running\{.*replica="([^"]+)"', text))
    assert len(names) == 2 and 'jpaged:replicas_told{all="true"} 2.0' in text
    refused = httpx.get(f"{cluster.url}/memory/events", timeout=SECONDS)
    assert refused.status_code == 400 and all(name in refused.json()["error"]["message"] for name in names)
    for name in names:
        with httpx.stream("GET", f"{cluster.url}/memory/events?server={name}", timeout=SECONDS) as response:
            assert (response.status_code, response.headers[NAMED]) == (200, name)


def test_a_conversation_goes_back_to_the_replica_that_holds_its_beginning(cluster):
    turns, holders = ["x" * 300, "y" * 300], []
    for turn in (*turns, *(turn + " and then?" for turn in turns)):
        answer = cluster.post(body(0, prompt=turn), headers={"X-Request-Id": "mine"})
        assert answer.headers.get_list("X-Request-Id") == ["mine"]
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        holders.append((answer.headers[NAMED], cached >= 250))
    (first, _), (second, _), *later = holders
    assert first != second  # a new prompt goes where less is held
    assert later == [(first, True), (second, True)]


RESPONSES = "/v1/responses"


def kept_by_both(cluster):
    """A stored response of each replica, by its name."""
    kept = {}
    for i in range(16):
        answer = cluster.post({"model": "tiny", "input": f"{i} hello " * 40, "max_output_tokens": 4}, RESPONSES)
        assert answer.status_code == 200, answer.text
        kept[answer.headers[NAMED]] = answer.json()
        if len(kept) == 2:
            return kept
    raise AssertionError("one replica was sent everything")


def about(cluster, method, response, more=""):
    return httpx.request(method, f"{cluster.url}{RESPONSES}/{response['id']}{more}", timeout=SECONDS)


def test_what_concerns_a_kept_response_goes_to_the_replica_that_keeps_it(cluster):
    kept = kept_by_both(cluster)
    for name, response in [*kept.items()] * 2:
        assert response["id"].startswith(f"resp_{name}-")
        found = about(cluster, "GET", response)
        assert (found.json(), found.headers[NAMED]) == (response, name)
        items = about(cluster, "GET", response, "/input_items")
        assert items.json()["data"][0]["role"] == "user" and items.headers[NAMED] == name
        told = about(cluster, "GET", response, "?stream=true&starting_after=1")
        assert told.headers[NAMED] == name and '"sequence_number":2,' in told.text
        body = {"model": "tiny", "input": "so", "max_output_tokens": 4, "previous_response_id": response["id"]}
        behind = cluster.post(body, RESPONSES)
        assert behind.status_code == 200 and behind.headers[NAMED] == name
    endless = {"model": "tiny", "input": "hello", "max_output_tokens": 8000, "ignore_eos": True, "background": True}
    running = cluster.post(endless, RESPONSES)
    cancelled = about(cluster, "POST", running.json(), "/cancel")
    assert cancelled.json()["status"] == "cancelled" and cancelled.headers[NAMED] == running.headers[NAMED]
    for response in kept.values():
        assert about(cluster, "DELETE", response).json()["deleted"]
        assert about(cluster, "GET", response).json()["error"]["code"] == "response_not_found"
    gone = about(cluster, "GET", {"id": "resp_gone0000-1"})
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "replica_lost"


@pytest.mark.nightly
def test_when_a_replica_ends_the_other_answers_all_that_had_not_begun_and_streams_say_what_happened(cluster, llm):
    kept = kept_by_both(cluster)
    endless = [body(i, max_tokens=8000) for i in range(2 * PLACES)]
    waiting = [body(i) for i in range(100, 100 + 2 * PLACES)]

    async def ask():
        async with httpx.AsyncClient(base_url=cluster.url, timeout=SECONDS) as http:
            streams = [await begin(http, one) for one in endless]
            lost = streams[0].replica
            asked = [asyncio.create_task(http.post(PATH, json=one)) for one in waiting[1:]]
            asked.append(asyncio.create_task(begin(http, waiting[0])))  # a stream that has not begun
            held = {stream.replica for stream in streams}
            assert len(held) == 2
            await asyncio.to_thread(until, lambda: sum(map(cluster.ongoing, held)) == len(endless) + len(waiting))
            assert cluster.ongoing(lost) > PLACES  # some wait there, as all of its places are taken
            assert not any(one.done() for one in asked)
            cluster.kill(lost)
            ends = [(await stream.rest())[-1] for stream in streams if stream.replica == lost]
            for stream in streams:  # those of the other go on; their clients go away, and make room
                if stream.replica != lost:
                    assert "error" not in await stream.event()
                    await stream.response.aclose()
            *answers, late = await asyncio.gather(*asked)
            return lost, ends, answers, late, await late.rest()

    lost, ends, answers, late, events = asyncio.run(ask())
    assert len(ends) == PLACES
    assert {end["error"]["code"] for end in ends} == {"replica_lost"}
    assert all(answer.status_code == 200 and answer.headers[NAMED] != lost for answer in answers)
    expected = tokens_of_one_engine(llm, waiting)
    assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == expected[1:]
    assert late.replica != lost and not any("error" in event for event in events)
    streamed = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert streamed == expected[0][-len(streamed) :] and len(streamed) >= 11
    for name, response in kept.items():
        found = about(cluster, "GET", response)
        said = found.json()["error"]
        assert said is None if name != lost else said["code"] == "replica_lost"


@pytest.mark.nightly
def test_replicas_that_are_chosen_by_load_are_asked_by_name_all_the_same(cluster, folder):
    cluster.deploy(arguments(folder, min_replicas=2, routing="load"))
    kept = kept_by_both(cluster)
    for response in kept.values():
        assert about(cluster, "GET", response).json() == response
        assert about(cluster, "DELETE", response).status_code == 200
    load = httpx.get(f"{cluster.url}/v1/load", timeout=SECONDS).json()
    assert load["whole"] and sorted(load["replicas"]) == sorted(kept)
    assert sorted(httpx.get(f"{cluster.url}/health", timeout=SECONDS).json()["replicas"]) == sorted(kept)


@pytest.mark.nightly
def test_replicas_come_with_the_load_and_go_with_it(cluster, folder):
    cluster.deploy(
        arguments(folder, target_ongoing_requests=1, upscale_delay_s=0, downscale_delay_s=1),
    )
    assert cluster.num_running() == 1

    async def load():
        async with httpx.AsyncClient(base_url=cluster.url, timeout=SECONDS) as http:
            asked = [asyncio.create_task(http.post(PATH, json=body(i, max_tokens=8000))) for i in range(2 * PLACES)]
            await asyncio.to_thread(until, lambda: cluster.num_running() == 2)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(load())
    until(lambda: cluster.num_running() == 1)
    assert cluster.post(body(1)).status_code == 200

"""Whoever followed a stored response when the server ended reads on from the event it saw last, and misses nothing."""

import json
import shutil

import pytest
from live_server import until
from openai import OpenAI

from jpaged.server.openai.responses.kept_files import KeptFiles
from jpaged.server.openai.responses.store import ResponseStore

PATH = "/v1/responses"
BODY = {"model": "tiny", "input": "hello", "max_output_tokens": 80, "seed": 3, "ignore_eos": True}
BACKGROUND = BODY | {"background": True}


def ask(server, **changes):
    return server.answer(PATH, BODY | changes)


def get(server, response):
    return server.http.get(f"{PATH}/{response['id']}").json()


def follow(server, response, number=None, **query):
    """The first events of a stored response, or all of them."""
    events = []
    path = f"{PATH}/{response['id']}"
    with server.http.stream("GET", path, params={"stream": True} | query) as stream:
        assert stream.status_code == 200, stream.read()
        for line in stream.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
            if len(events) == number:
                break
    return events


def text(events):
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def numbers(events):
    return [event["sequence_number"] for event in events]


@pytest.fixture
def undisturbed(serve):
    """Return what the answer's text is on a server that nothing happens to."""
    server = serve()
    (item,) = ask(server)["output"]
    server.stop()
    return item["content"][0]["text"]


@pytest.fixture
def begun(serve, pace, tmp_path):
    """A server that keeps its state and has told the first two pieces of a response's text."""
    server = serve(state_dir=tmp_path, save_every=1e6, drain_seconds=0.0)
    pace.left = 0
    response = ask(server, **BACKGROUND)
    until(lambda: server.engine.stats().num_waiting == 1)

    def written():
        return [item["content"][0]["text"] for item in get(server, response)["output"]]

    def longer(steps):
        before = written()
        pace.make(steps)
        until(lambda: written() != before)

    longer(8)
    return server, response, longer


def killed(server, tmp_path):
    """End a server; return a folder as it would be if the server had been killed just before."""
    folder = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-killed"))
    server.stop()
    return folder


def restarted(serve, pace, folder):
    server = serve(state_dir=folder, save_every=1e6)
    pace.go_on()
    return server


def told(tmp_path, response):
    return KeptFiles(tmp_path / "responses").events("", response["id"])


@pytest.mark.parametrize("saved", ["before", "behind", "never"])
def test_a_reader_goes_on_behind_the_last_event_that_it_saw(serve, pace, undisturbed, begun, tmp_path, saved):
    server, response, longer = begun
    if saved == "before":  # what clients saw is ahead of the state that was saved
        server.call(server.engine.save_state(tmp_path))
    longer(8)
    seen = follow(server, response, 6)
    if saved == "behind":
        longer(8)
        server.call(server.engine.save_state(tmp_path))
    folder = killed(server, tmp_path)
    again = restarted(serve, pace, folder)
    rest = follow(again, response, starting_after=seen[-1]["sequence_number"])
    assert text(seen) + text(rest) == undisturbed and text(seen) and text(rest)
    assert numbers(seen) + numbers(rest) == list(range(len(seen) + len(rest)))
    whole = follow(again, response)
    assert whole == seen + rest, "what had a number has it still"
    again.stop()
    last = serve(state_dir=folder, save_every=1e6)
    assert follow(last, response) == whole
    assert follow(last, response, starting_after=len(whole) - 3) == whole[-2:]


def test_a_stream_that_the_servers_end_cut_off_goes_on_in_the_same_item(serve, pace, undisturbed, begun, tmp_path):
    server, response, longer = begun
    longer(8)
    server.terminate()
    server.join()
    seen = [json.loads(event.split(b"data: ", 1)[1]) for event in told(tmp_path, response)]
    assert seen[-1]["type"] == "response.incomplete" and seen[-1]["response"]["incomplete_details"]
    again = restarted(serve, pace, tmp_path)
    rest = follow(again, response, starting_after=len(seen) - 1)
    assert text(seen) + text(rest) == undisturbed and rest[0]["type"] == "response.output_text.delta"
    assert numbers(rest)[0] == len(seen)
    whole = follow(again, response)
    assert text(whole) == undisturbed and numbers(whole) == sorted(set(numbers(whole)))
    ends = [event["type"] for event in whole if event["type"] in ("response.completed", "response.incomplete")]
    assert len(ends) == 1, "it ended once"
    again.stop()
    last = serve(state_dir=tmp_path, save_every=1e6)
    assert follow(last, response) == whole


@pytest.mark.parametrize("saved", [True, False])
def test_log_probabilities_are_told_once(serve, pace, begun, tmp_path, saved):
    server, _, _ = begun
    pace.go_on()
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    want = ask(server, **wanted)["output"][0]["content"][0]["logprobs"]
    pace.left = 0
    response = ask(server, **BACKGROUND, **wanted)
    until(lambda: server.engine.stats().num_waiting == 1)
    pace.make(8)
    until(lambda: get(server, response)["output"])
    if saved:
        server.call(server.engine.save_state(tmp_path))
    again = restarted(serve, pace, killed(server, tmp_path))
    events = follow(again, response)
    found = [one for event in events if "delta" in event for one in event["logprobs"]]
    assert [one["token"] for one in found] == [one["token"] for one in want]


def test_where_the_events_were_not_kept_a_reader_is_told_to_begin_anew(serve, pace, undisturbed, begun, tmp_path):
    server, response, _ = begun
    server.stop()
    for file in (tmp_path / "responses").glob("*.events"):
        file.unlink()
    again = restarted(serve, pace, tmp_path)
    path = f"{PATH}/{response['id']}"
    refused = again.http.get(path, params={"stream": True, "starting_after": 5})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "starting_after"
    assert text(follow(again, response)) == undisturbed


# ---------------------------------------------------------------------- without a restart


def test_behind_the_last_event_there_is_an_empty_stream(server):
    response = ask(server, max_output_tokens=3)
    whole = follow(server, response)
    for last in (len(whole) - 1, len(whole), 10**6):
        assert follow(server, response, starting_after=last) == []


def test_the_stream_of_a_response_that_was_cancelled_ends_with_an_event_that_says_so(serve, pace, tmp_path):
    server = serve(state_dir=tmp_path, save_every=1e6)
    pace.left = 0
    response = ask(server, **BACKGROUND)
    cancelled = server.http.post(f"{PATH}/{response['id']}/cancel").json()
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    with client.responses.stream(response_id=response["id"]) as seen:  # it takes no first event but response.created
        assert [event.type for event in seen] == ["response.created", "response.cancelled"]
    begun, ended = events = follow(server, response)
    assert begun["response"]["status"] == "in_progress" and ended["response"] == cancelled
    pace.go_on()
    server.stop()
    assert follow(restarted(serve, pace, tmp_path), response) == events


def test_any_id_that_a_client_may_choose_can_be_stored_read_and_forgotten(serve, tmp_path):
    server = serve(state_dir=tmp_path, save_every=1e6, max_stored_responses=1)
    odd = {"X-Request-Id": ":" * 128}
    for _ in range(2):  # the second makes room by forgetting the first
        made = server.http.post(PATH, json=BODY | {"max_output_tokens": 2}, headers=odd)
        assert made.status_code == 200, made.text
    assert get(server, made.json()) == made.json()
    server.stop()
    again = serve(state_dir=tmp_path, save_every=1e6, max_stored_responses=1)
    assert get(again, made.json()) == made.json()
    assert again.http.delete(f"{PATH}/{made.json()['id']}").status_code == 200
    assert list((tmp_path / "responses").iterdir()) == []


# ---------------------------------------------------------------------- one of several replicas


def test_a_replica_is_part_of_its_responses_ids_and_says_which_other_is_gone(server):
    server.app.state.responses = ResponseStore(server.serving, 8, replica="me1")
    first = ask(server, max_output_tokens=2)
    assert first["id"].startswith("resp_me1-") and get(server, first) == first
    assert ask(server, max_output_tokens=2, previous_response_id=first["id"])["previous_response_id"] == first["id"]
    lost = server.http.get(f"{PATH}/resp_other2-{first['id'][9:]}")
    assert lost.status_code == 404 and lost.json()["error"]["code"] == "replica_lost"
    error = server.refusal(PATH, BODY | {"previous_response_id": "resp_other2-1"}, 404)
    assert (error["code"], error["param"]) == ("replica_lost", "previous_response_id")
    for name in ("resp_none", "resp_me1-none", "none"):
        unknown = server.http.get(f"{PATH}/{name}")
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "response_not_found"

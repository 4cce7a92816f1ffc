"""Responses are kept for the key that asked for them: read, followed, gone on from, cancelled, deleted, restored."""

import json

import pytest
from live_server import until
from openai import OpenAI

from jpaged.server.access import Key
from jpaged.server.openai.responses import store

PATH = "/v1/responses"
BODY = {"model": "tiny", "input": "hello", "max_output_tokens": 12, "seed": 3, "ignore_eos": True}
LONG = BODY | {"max_output_tokens": 80}


def ask(server, **changes):
    return server.answer(PATH, BODY | changes)


def get(server, response, **options):
    return server.http.get(f"{PATH}/{response['id']}", **options)


def events(server, response, **query):
    """The events of a response, with their kinds as they are in the stream and in the data."""
    with server.http.stream("GET", f"{PATH}/{response['id']}", params={"stream": True} | query) as stream:
        assert stream.status_code == 200
        return [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]


def text(response):
    return response["output"][0]["content"][0]["text"]


def test_a_response_is_read_again_until_it_is_deleted(server):
    response = ask(server, metadata={"a": "b"})
    assert get(server, response).json() == response and response["store"] and response["metadata"] == {"a": "b"}
    (item,) = server.http.get(f"{PATH}/{response['id']}/input_items").json()["data"]
    parts = [{"type": "input_text", "text": "hello"}]
    assert (item["type"], item["role"], item["content"]) == ("message", "user", parts)
    told = events(server, response)
    assert told[-1]["response"] == response and [one["sequence_number"] for one in told] == list(range(len(told)))
    assert events(server, response, starting_after=len(told) - 3) == told[-2:]
    gone = server.http.delete(f"{PATH}/{response['id']}").json()
    assert gone == {"id": response["id"], "object": "response", "deleted": True}
    assert get(server, response).status_code == 404


def test_input_items_are_listed_by_pages_the_last_first_as_openais_client_asks(server):
    said = [{"role": "user", "content": text, "id": "a" if text < "c" else None} for text in "abc"]  # one id twice
    response = ask(server, input=said)
    items = OpenAI(base_url=f"{server.url}/v1", api_key="none").responses.input_items
    for order, want in (({}, "cba"), ({"order": "desc"}, "cba"), ({"order": "asc"}, "abc")):
        for limit in (1, 2, 100):  # the client asks for one page after the other
            found = list(items.list(response["id"], limit=limit, **order))
            assert "".join(item.content[0].text for item in found) == want
    for query in ({"order": "up"}, {"limit": 0}, {"limit": 101}, {"after": "none"}, {"include": "a"}):
        refused = server.http.get(f"{PATH}/{response['id']}/input_items", params=query)
        assert refused.status_code == 400 and refused.json()["error"]["param"] in query


def test_what_is_not_stored_or_not_asked_for_is_not_there(server):
    for response in (ask(server, store=False), {"id": "resp_none"}):
        found = get(server, response)
        assert found.status_code == 404 and found.json()["error"]["code"] == "response_not_found"
    for query in ({"include": "a"}, {"starting_after": 3}):
        assert get(server, ask(server), params=query).json()["error"]["param"] in query


def test_half_a_character_in_what_an_answer_repeats_is_told_as_it_came(server):
    response = ask(server, metadata={"a": "\ud800"})
    assert response["metadata"] == get(server, response).json()["metadata"] == {"a": "\ud800"}


def test_only_background_responses_are_refused_where_as_many_run_as_are_kept(serve, pace):
    server = serve(max_stored_responses=1)
    pace.left = 0
    ask(server, **LONG | {"background": True})
    assert server.refusal(PATH, LONG | {"background": True}, 429)["code"] == "too_many_responses"
    pace.go_on()
    assert ask(server)["output"]


def test_of_many_responses_the_oldest_make_room(serve):
    server = serve(max_stored_responses=2)
    first, second, third = (ask(server, max_output_tokens=2) for _ in range(3))
    assert [get(server, one).status_code for one in (first, second, third)] == [404, 200, 200]


def test_room_for_bytes_is_made_when_a_response_ends(serve, pace, monkeypatch):
    server = serve()
    first = ask(server)
    pace.left = 0
    second = ask(server, **BODY | {"background": True})
    monkeypatch.setattr(store, "MOST_BYTES", 1)
    assert get(server, first).status_code == 200
    pace.go_on()
    until(lambda: get(server, first).status_code == 404)
    assert text(get(server, second).json()) == text(first), "the newest stays"


def test_a_key_neither_reads_nor_ends_nor_goes_on_from_the_responses_of_another(serve, pace):
    server = serve(keys=(Key.of("one", "alice"), Key.of("two", "bob")), max_stored_responses=1)
    alice, bob = ({"Authorization": f"Bearer {key}", "X-Request-Id": "same"} for key in ("one", "two"))
    mine = server.http.post(PATH, json=BODY, headers=alice).json()
    path = f"{PATH}/{mine['id']}"
    assert server.http.get(path, headers=bob).status_code == 404
    assert server.http.delete(path, headers=bob).status_code == 404
    assert server.http.post(f"{path}/cancel", headers=bob).status_code == 404
    behind = server.http.post(PATH, json=BODY | {"previous_response_id": mine["id"]}, headers=bob)
    assert behind.status_code == 404
    theirs = server.http.post(PATH, json=BODY | {"input": "other"}, headers=bob).json()
    assert theirs["id"] != mine["id"], "a gateway may repeat the request's id"
    assert server.http.get(path, headers=alice).json() == mine, "bob's took the room of his own"
    assert server.http.get(path, headers=bob).status_code == 404
    assert server.http.get(f"{PATH}/{theirs['id']}", headers=bob).json() == theirs


def test_a_background_response_goes_on_alone_and_is_followed_from_anywhere(server, pace):
    want = text(ask(server, **LONG))
    pace.left = 0
    queued = ask(server, **LONG | {"background": True})
    assert queued["status"] == "queued" and queued["output"] == []
    until(lambda: server.engine.stats().num_waiting == 1)
    pace.make(8)
    until(lambda: get(server, queued).json()["output"])
    now = get(server, queued).json()
    assert now["status"] == "in_progress" and want.startswith(text(now)) and text(now)
    assert server.refusal(PATH, BODY | {"previous_response_id": queued["id"]})["param"] == "previous_response_id"
    pace.go_on()
    told = events(server, queued)
    assert "".join(one["delta"] for one in told if one["type"] == "response.output_text.delta") == want
    assert text(get(server, queued).json()) == want
    assert server.http.post(f"{PATH}/{queued['id']}/cancel").json()["status"] == told[-1]["response"]["status"]


def test_a_background_response_that_is_cancelled_or_deleted_gives_its_memory_back(server, pace):
    pace.left = 0
    kept, deleted = (ask(server, **LONG | {"background": True}) for _ in range(2))
    until(lambda: server.engine.stats().num_waiting == 2)
    pace.make(8)
    until(lambda: get(server, kept).json()["output"])
    cancelled = server.http.post(f"{PATH}/{kept['id']}/cancel").json()
    assert cancelled["status"] == "cancelled" == get(server, kept).json()["status"]
    assert events(server, kept)[-1]["response"] == cancelled and cancelled["output"][0]["status"] == "incomplete"
    server.http.delete(f"{PATH}/{deleted['id']}")
    until(lambda: server.serving.num_active == 0)
    assert server.used_blocks() == 0
    pace.go_on()
    plain = ask(server)
    assert server.refusal(f"{PATH}/{plain['id']}/cancel", {})["param"] == "response_id"


def test_a_response_goes_on_from_one_before(server):
    first = ask(server, instructions="be kind")
    turns = [{"role": "user", "content": "hello"}, *first["output"], {"role": "user", "content": "and then"}]
    want = ask(server, input=turns)
    second = ask(server, input="and then", previous_response_id=first["id"])
    assert text(second) == text(want) and second["previous_response_id"] == first["id"]
    third = ask(server, input="so", previous_response_id=second["id"])
    again = ask(server, input=[*turns, *second["output"], {"role": "user", "content": "so"}])
    assert text(third) == text(again)


def test_logprobs_are_those_of_the_chat_whole_and_streamed(server):
    want = server.chat(max_tokens=12, seed=3, ignore_eos=True, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"][
        "content"
    ]
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = ask(server, **wanted)
    got = response["output"][0]["content"][0]["logprobs"]
    assert [one["token"] for one in got] == [one["token"] for one in want] and len(got) == 12
    assert [one["logprob"] for one in got] == pytest.approx([one["logprob"] for one in want], abs=1e-4)
    assert all(len(one["top_logprobs"]) == 2 for one in got)
    deltas = [one for one in events(server, response) if one["type"] == "response.output_text.delta"]
    assert [entry for one in deltas for entry in one["logprobs"]] == got
    assert ask(server)["output"][0]["content"][0]["logprobs"] == []


def test_logprobs_of_a_text_that_is_taken_apart_are_refused(serve):
    server = serve(reasoning_parser="think")
    assert server.refusal(PATH, BODY | {"include": ["message.output_text.logprobs"]})["param"] == "include"


# ---------------------------------------------------------------------- over a restart


def test_after_a_restart_who_asks_by_id_gets_the_rest_and_what_was_there_before(serve, pace, tmp_path):
    server = serve()
    want = [text(ask(server, **LONG | {"input": name})) for name in ("saved", "late")]
    server.stop()
    server = serve(state_dir=tmp_path, save_every=1e6)
    done = ask(server)
    pace.left = 0
    saved = ask(server, **LONG | {"input": "saved", "background": True})
    until(lambda: server.engine.stats().num_waiting == 1)
    pace.make(10)
    until(lambda: get(server, saved).json()["output"])
    seen = text(get(server, saved).json())
    assert server.call(server.engine.save_state(tmp_path)).num_requests >= 1
    late = ask(server, **LONG | {"input": "late", "background": True})
    until(lambda: server.engine.stats().num_waiting == 1)
    server.stop()  # without another save, as when it is killed
    again = serve(state_dir=tmp_path, save_every=1e6)
    until(lambda: again.engine.restored_requests == [])  # the one that was saved has been taken up
    pace.go_on()
    for response, whole in zip((saved, late), want, strict=True):
        told = events(again, response)
        assert told[-1]["response"]["id"] == response["id"] and text(told[-1]["response"]) == whole
    assert text(get(again, saved).json()).startswith(seen)
    assert get(again, done).json() == done
    again.http.delete(f"{PATH}/{done['id']}")
    again.stop()
    last = serve(state_dir=tmp_path, save_every=1e6)
    assert [get(last, one).status_code for one in (done, saved, late)] == [404, 200, 200]


def test_a_kept_response_of_another_model_or_a_key_that_is_gone_is_left_out(serve, tmp_path, caplog):
    server = serve(state_dir=tmp_path, save_every=1e6, keys=(Key.of("one", "alice"),))
    response = server.http.post(PATH, json=BODY, headers={"Authorization": "Bearer one"}).json()
    server.stop()
    (tmp_path / "responses" / "broken.json").write_text("{")
    later = serve(state_dir=tmp_path, save_every=1e6)
    assert get(later, response).status_code == 404
    assert caplog.text.count("a kept response is skipped") == 2

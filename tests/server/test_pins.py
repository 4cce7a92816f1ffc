"""Prefixes that are pinned over HTTP: by whom, for how long, and while requests run."""

import pytest

from jpaged.server.access import Key

PATH = "/v1/cache/pins"
PREFIX = list(range(5, 25))  # two blocks of eight and four tokens more
EMBEDS = {"type": "image_embeds", "image_embeds": {"image_embeds": "AAAA"}}
LONG = {"prompt": "the cab", "max_tokens": 100, "ignore_eos": True, "seed": 1}


def test_a_prefix_is_pinned_listed_shared_and_ended(server):
    made = server.answer(PATH, {"prompt": PREFIX, "seconds": 60})
    assert made["object"] == "cache.pin" and made["tokens"] == 16 and made["seconds_left"] == 60
    (listed,) = server.http.get(PATH).json()["data"]
    assert listed["id"] == made["id"] and 0 < listed["seconds_left"] <= 60
    usage = server.complete(prompt=[*PREFIX, 7])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16
    assert server.used_blocks() > 0
    ended = server.http.delete(f"{PATH}/{made['id']}")
    assert ended.json() == {"id": made["id"], "object": "cache.pin", "deleted": True}
    assert server.used_blocks() == 0 and server.http.get(PATH).json()["data"] == []
    again = server.http.delete(f"{PATH}/{made['id']}")
    assert again.status_code == 404 and again.json()["error"]["code"] == "pin_not_found"


def test_a_prefix_is_pinned_while_a_stream_goes_on(server, pace):
    with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        made = server.answer(PATH, {"prompt": [*range(30, 50)]})
        assert sum(line.startswith("data:") for line in lines) > 1
    assert made["seconds_left"] == 300
    server.http.delete(f"{PATH}/{made['id']}")


def test_the_beginning_of_a_conversation_is_found_by_what_goes_on_from_it(server):
    messages = [{"role": "system", "content": "the cab is far and the bed is bad, so a cafe is a fad"}]
    made = server.answer(PATH, {"messages": messages})
    answer = server.chat(messages=[*messages, {"role": "user", "content": "hi"}])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["tokens"] > 0
    server.http.delete(f"{PATH}/{made['id']}")


def test_a_pin_belongs_to_its_key_and_to_prompts_of_that_keys_salt(serve):
    server = serve(keys=(Key.of("s1", "one"), Key.of("s2", "two")))
    one, two = ({"Authorization": f"Bearer {secret}"} for secret in ("s1", "s2"))
    assert server.http.post(PATH, json={"prompt": PREFIX}).status_code == 401
    made = server.http.post(PATH, json={"prompt": PREFIX}, headers=one).json()
    assert server.http.get(PATH, headers=two).json()["data"] == []
    assert server.http.delete(f"{PATH}/{made['id']}", headers=two).status_code == 404
    body = {"prompt": [*PREFIX, 7], "max_tokens": 1}
    cached = [
        server.http.post("/v1/completions", json=body, headers=key).json()["usage"]["prompt_tokens_details"]
        for key in (one, two)
    ]
    assert [each["cached_tokens"] for each in cached] == [16, 0]
    assert server.http.delete(f"{PATH}/{made['id']}", headers=one).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": [5] * 3}, None),
        ({"prompt": [10**9] * 20}, "prompt"),
        ({"prompt": PREFIX, "seconds": 0}, "seconds"),
        ({"prompt": PREFIX, "seconds": 1e9}, "seconds"),
        ({"prompt": PREFIX, "cache_salt": ""}, "cache_salt"),
        ({"prompt": PREFIX, "ttl": 5}, "ttl"),
        ({"messages": [{"role": "user", "content": [EMBEDS]}]}, "messages.0.content.0"),
    ],
)
def test_what_cannot_be_pinned_is_refused_by_its_name(server, body, param):
    assert server.refusal(PATH, body)["param"] == param
    assert server.http.get(PATH).json()["data"] == []

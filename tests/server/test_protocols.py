"""A protocol is one folder and one row: the code that all requests pass asks the row of the path's protocol."""

import asyncio
import json
from pathlib import Path

import httpx
import plain_protocol
import pytest
from scripted_model import Script, ScriptedModel

from jpaged import EngineBusy
from jpaged.integrations.ray.hints import CHUNK, prefix_chain
from jpaged.server import protocols
from jpaged.server.access import Key
from jpaged.server.app import create_app
from jpaged.server.batch import Unanswered, read_requests, run_batch
from jpaged.server.settings import ServerSettings

SCRIPTS = {
    "hi": Script(("Hel", "lo")),
    "busy": Script(("a", "b"), fails=EngineBusy("full")),
    "broken": Script(("a", "b"), fails=RuntimeError("secret")),
}


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setattr(protocols, "PROTOCOLS", [*protocols.PROTOCOLS, "plain_protocol"])


def ask(body, path="/plain", settings=None, **headers):
    app = create_app(ScriptedModel(SCRIPTS), settings or ServerSettings(model="tiny"))

    async def asked():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(asked())


def test_a_protocol_is_sixty_lines():
    lines = Path(plain_protocol.__file__).read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 60


def test_an_added_protocol_answers_whole_and_streamed(added):
    assert ask({"say": "#hi#"}).text == "say Hello\nend stop 2\n"
    assert ask({"say": "#hi#", "live": True}).text == "say Hel\nsay lo\nend stop 2\n"


def test_without_its_row_there_is_no_such_path():
    assert ask({"say": "#hi#"}).json()["error"]["type"] == "not_found_error"


def test_every_error_of_a_path_has_the_form_of_its_protocol(added):
    for body, status, said in (
        ({"say": "#hi#", "most": -1}, 400, "most: most=-1"),
        ({"say": "#hi#", "nope": 1}, 400, "nope: Unrecognized"),
        ([], 400, "None: the body must be a JSON object"),
        ({"say": "#hi# " * 500}, 400, "say: say: the prompt has 508 tokens"),
        ({"say": "#busy#"}, 429, "None: full"),
        ({"say": "#broken#"}, 500, "None: the server failed"),
    ):
        answer = ask(body)
        assert answer.status_code == status and answer.json()["wrong"].startswith(said), answer.text
    assert ask({}, "/plain/nothing").json() == {"wrong": "None: Not Found"}
    late = ask({"say": "#broken#", "live": True}).text.split("\n")
    assert late[:2] == ["say a", "event: wrong"] and json.loads(late[2].removeprefix("data: ")).keys() == {"wrong"}


def test_the_key_is_read_from_the_protocols_header(added):
    keyed = ServerSettings(model="tiny", keys=(Key.of("one", "alice"),))
    assert ask({"say": "#hi#"}, settings=keyed, **{"X-Plain": "one"}).status_code == 200
    refused = ask({"say": "#hi#"}, settings=keyed, Authorization="Bearer one")
    assert refused.status_code == 401 and "X-Plain: KEY" in refused.json()["wrong"]
    assert ask({"messages": []}, "/v1/chat/completions", keyed, **{"X-Plain": "one"}).status_code == 401


def test_batches_and_routing_know_its_paths(added, tmp_path):
    for name, said in (("hi", None), ("broken", "got status 500: None: the server failed")):
        file, output = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.out"
        line = {"custom_id": "a", "method": "POST", "url": "/plain", "body": {"say": f"#{name}#", "most": 0}}
        line["body"] |= {"most": 4} if said else {}
        file.write_text(json.dumps(line))
        app = create_app(ScriptedModel(SCRIPTS), ServerSettings(model="t"))
        run = run_batch(app, read_requests(file), output, concurrency=1)
        if said is None:
            assert asyncio.run(run) == 1 and "wrong" in output.read_text()
        else:
            with pytest.raises(Unanswered, match=said):
                asyncio.run(run)
    one = prefix_chain("/plain", json.dumps({"say": "a" * 2 * CHUNK + "b"}).encode())
    other = prefix_chain("/plain", json.dumps({"say": "a" * 2 * CHUNK + "c" * CHUNK}).encode())
    assert len(one) == 2 and other[:2] == one


def test_the_document_has_each_paths_form_of_errors(added):
    paths = create_app(ScriptedModel(SCRIPTS), ServerSettings(model="tiny")).openapi()["paths"]

    def form(path):
        return paths[path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]["required"]

    assert form("/plain") == ["wrong"]
    assert form("/v1/messages") == ["type", "error"]
    assert form("/v1/chat/completions") == form("/tokenize") == ["error"]

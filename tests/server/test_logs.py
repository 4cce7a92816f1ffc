"""The log: which lines have a request's id, and that prompts stand in none unless the operator asks for them."""

import json
import logging

import pytest
from live_server import until

from jpaged.server.logs import REQUEST_ID, JsonLines, PlainLines, configure_logs
from jpaged.server.settings import ServerSettings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MINE = {"X-Request-Id": "mine-1"}


class Lines(logging.Handler):
    """Keeps what the log of a server would hold."""

    def __init__(self):
        super().__init__()
        self.setFormatter(JsonLines())
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.fixture
def lines():
    handler, logger = Lines(), logging.getLogger("jpaged")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_line_has_the_id_of_the_request_it_was_written_for(server, lines, monkeypatch):
    inner = logging.getLogger("jpaged.text")
    prompt = server.engine.chat_prompt

    def told(messages, **options):  # in a thread beside the event loop
        inner.info("a prompt is made")
        return prompt(messages, **options)

    monkeypatch.setattr(server.engine, "chat_prompt", told)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert server.post(CHAT, body).status_code == 200
    assert server.http.post(CHAT, json=body, headers=MINE).status_code == 200
    inner.info("of no request")
    until(lambda: sum('"seconds"' in line for line in lines) == 2)
    made = [json.loads(line) for line in lines if "a prompt is made" in line]
    assert len(made) == 2 and made[1]["request_id"] == "mine-1" != made[0]["request_id"]
    (other,) = [json.loads(line) for line in lines if "of no request" in line]
    assert "request_id" not in other and REQUEST_ID.get() is None


def written(lines):
    return [json.loads(line) for line in lines if '"outputs"' in line]


def test_prompts_and_outputs_are_written_where_that_is_asked_for(serve, lines):
    server = serve(log_prompts=True, reasoning_parser="think")
    whole = server.complete(prompt=["a secret", [5, 6]], n=2, seed=1)
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 2}
    streamed = server.chunks(CHAT, chat)
    server.answer("/v1/responses", {"input": "hello", "max_output_tokens": 8, "seed": 2})
    server.complete(use_beam_search=True, n=2, max_tokens=3)
    found = written(lines)
    assert len(found) == 5
    texts = [one["text"] for line in found[:2] for one in line["outputs"]]
    assert sorted(texts) == sorted(choice["text"] for choice in whole["choices"])
    assert {str(line.get("prompt", line.get("prompt_token_ids"))) for line in found[:2]} == {"a secret", "[5, 6]"}
    assert found[0]["request_id"] == whole["id"].removeprefix("cmpl-") and found[0]["key"] is None
    said = [choice["delta"] for chunk in streamed for choice in chunk["choices"]]
    assert found[2]["outputs"][0]["text"] == "".join(one.get("content") or "" for one in said)
    assert "hello" in found[2]["prompt"] and found[2]["outputs"][0]["finish_reason"] in ("stop", "length")
    assert found[3]["outputs"] == found[2]["outputs"] and len(found[4]["outputs"]) == 2


def test_a_request_that_is_refused_or_cut_off_has_its_line_too(serve, lines, pace):
    server = serve(log_prompts=True)
    server.refusal(TEXT, {"prompt": "secret " * 200})
    pace.left = 3
    with server.http.stream(
        "POST", TEXT, json={"prompt": "cut off", "max_tokens": 90, "ignore_eos": True, "stream": True}
    ) as response:
        next(response.iter_lines())
    pace.go_on()
    until(lambda: len(written(lines)) == 2)
    refused, cut = written(lines)
    assert refused["outputs"] == [] and "secret" in refused["prompt"]
    assert cut["prompt"] == "cut off" and cut["outputs"][0]["finish_reason"] is None


def test_prompts_are_in_no_line_otherwise(server, lines):
    server.complete(prompt="a secret")
    server.refusal(TEXT, {"prompt": "secret " * 200})
    server.chunks(CHAT, {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 4})
    until(lambda: len(lines) >= 3)
    assert "secret" not in "".join(lines)
    assert ServerSettings(model="tiny").log_prompts is False


@pytest.mark.parametrize(
    ("log_format", "terminal", "kind"),
    [(None, True, PlainLines), (None, False, JsonLines), ("json", True, JsonLines), ("text", False, PlainLines)],
)
def test_a_terminal_has_text_and_a_pipe_json_unless_told(monkeypatch, log_format, terminal, kind):
    chosen = {}
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(logging, "basicConfig", lambda **given: chosen.update(given))
    levels = {name: logging.getLogger(name).level for name in ("jpaged", "uvicorn.error", "jpaged.prompts")}
    configure_logs("info", log_format=log_format)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    assert type(chosen["handlers"][0].formatter) is kind
    with pytest.raises(ValueError, match="log_format='xml' is not one of text, json"):
        configure_logs("info", log_format="xml")


def test_a_line_for_a_person_has_the_fields_of_a_request_by_name():
    def line(name, level, text):
        return PlainLines().format(logging.LogRecord(name, level, "", 0, text, None, None))[9:]

    assert line("jpaged.access", logging.INFO, '{"time": 1, "path": "/v1", "status": 200, "key": null}') == (
        "path=/v1 status=200"
    )
    assert line("jpaged", logging.WARNING, "it is late") == "warning: it is late"
    access = json.dumps({"path": "/a\n12:00:00 error", "user": "\x1b[2J"})
    assert line("jpaged.access", logging.INFO, access) == 'path="/a\\n12:00:00 error" user="\\u001b[2J"'

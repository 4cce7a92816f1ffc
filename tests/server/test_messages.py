"""`/v1/messages` and `/v1/messages/count_tokens` with a scripted model: what it is shown, and what clients get."""

import asyncio
import json
import time
from datetime import datetime

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_answers import CITY, SCRIPTS
from scripted_model import Script, ScriptedModel
from thorough import examples

from jpaged import SamplingParams
from jpaged.server.access import Key
from jpaged.server.anthropic.bodies import CountRequest, MessagesRequest
from jpaged.server.anthropic.rendering import MessageBlocks
from jpaged.server.app import create_app
from jpaged.server.caller import Caller
from jpaged.server.openai.responses.answer import Items
from jpaged.server.settings import ServerSettings
from jpaged.server.turn import Arguments, Begun, CallBegun, CallEnded, Ended, Text, Thought

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
F = {"name": "f", "description": "about", "input_schema": CITY}
G = {"name": "g", "input_schema": {"type": "object"}}
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
SPLIT = {"tool_parser": "hermes", "reasoning_parser": "think"}
CACHED = {"cache_control": {"type": "ephemeral"}}
LINE = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"


WITHOUT_CALLS = ("text", "empty", "stopped", "stopid", "long", "aborted", "thought", "open")
WITH_CALLS = ("all", "cutcall", "two")


def server(**more):
    model = ScriptedModel(SCRIPTS)
    return model, create_app(model, ServerSettings(model="tiny", aliases=("claude-*",), **SPLIT | more))


def ask(body, path=PATH, app=None, method="POST", **headers):
    app = app or server()[1]

    async def asked():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(asked())


def body(script="text", **more):
    return {"model": "claude-x", "max_tokens": 100, "messages": [{"role": "user", "content": f"#{script}#"}]} | more


def events(answer):
    """Return the events of a stream, each of which has its type twice."""
    found = []
    for each in answer.text.strip().split("\n\n"):
        name, data = each.split("\n")
        data = json.loads(data.removeprefix("data: "))
        assert name == f"event: {data['type']}"
        found.append(data)
    return found


def accumulated(events):
    """Return the message of a stream as clients put it together, and check the order of its events."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    message, texts, is_open = events[0]["message"], {}, False
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            is_open = True
            message["content"].append(dict(event["content_block"]))
            continue
        assert is_open and event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use" and (text := texts.get(event["index"])):
                try:
                    block["input"] = json.loads(text)
                except ValueError:
                    assert events[-2]["delta"]["stop_reason"] not in ("tool_use", "end_turn")
            continue
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            texts[event["index"]] = texts.get(event["index"], "") + delta["partial_json"]
        else:
            name = delta["type"].removesuffix("_delta")
            block[name] += delta[name]
    assert not is_open
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


@pytest.mark.parametrize("script", [*WITHOUT_CALLS, *WITH_CALLS])
def test_a_stream_is_the_whole_answer_in_pieces(script):
    asked = body(script, tools=[F, G]) if script in WITH_CALLS else body(script)
    whole = ask(asked, **{"X-Request-Id": "r"}).json()
    streamed = accumulated(events(ask(asked | {"stream": True}, **{"X-Request-Id": "r"})))
    number = len(whole["content"])
    for message in (whole, streamed):
        message.pop("id")
        for block in message["content"]:
            assert block.pop("id", "toolu_").startswith("toolu_")
        message["usage"].pop("output_tokens_details")  # a text's pieces need not end with its tokens
    assert streamed == whole and (number or script == "empty")


@pytest.mark.parametrize(
    ("script", "reason", "sequence"),
    [
        ("text", "end_turn", None),
        ("stopped", "stop_sequence", "END"),
        ("stopid", "end_turn", None),
        ("long", "max_tokens", None),
        ("aborted", "pause_turn", None),
        ("two", "tool_use", None),
        ("stopcall", "stop_sequence", "1"),
    ],
)
def test_the_reason_of_the_end(script, reason, sequence):
    answer = ask(body(script, tools=[F, G], max_tokens=2 if script == "long" else 100)).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_an_answer_that_fills_the_context_says_so():
    assert ask(body("long", max_tokens=9)).json()["stop_reason"] == "model_context_window_exceeded"


def test_an_answer_that_can_never_go_on_is_not_one_to_be_continued():
    model, app = server()
    model.scripts = SCRIPTS | {"astray": Script(("half ",), "abort", "no token fits the grammar")}
    whole = ask(body("astray"), app=app).json()
    assert whole["stop_reason"] == "refusal" and whole["stop_details"]["explanation"] == "no token fits the grammar"
    assert accumulated(events(ask(body("astray", stream=True), app=app)))["stop_details"] == whole["stop_details"]
    response = ask({"input": "#astray#"}, "/v1/responses", app).json()
    assert response["status"] == "failed" and response["error"]["message"] == "no token fits the grammar"
    assert response["output"][0]["status"] == "incomplete"
    job = app.state.responses.find(Caller("r"), response["id"])
    assert job.response == response and not job.was_cut_off, "a restarted server would generate it again"


def test_tokens_that_were_cached_are_counted_apart_from_the_start_on():
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4}
    found = events(ask(body("thought", stream=True)))
    assert found[0]["message"]["usage"] == usage | {"output_tokens": 0}
    last = found[-2]["usage"]
    assert last.items() >= (usage | {"output_tokens": len(SCRIPTS["thought"].pieces)}).items()
    assert 0 < last["output_tokens_details"]["thinking_tokens"] < last["output_tokens"]
    assert ask(body("thought"), COUNT).json() != {"input_tokens": 8}  # max_tokens is no field of a count
    assert ask({"messages": body()["messages"]}, COUNT).json() == {"input_tokens": 8}


def test_thoughts_have_signatures_and_may_be_left_out():
    asked = body("thought", thinking={"type": "enabled", "budget_tokens": 1024})
    answer = ask(asked).json()
    assert answer["content"][0]["thinking"] == "why not\n" and len(answer["content"][0]["signature"]) > 20
    assert answer["content"][1] == {"type": "text", "text": "because"}
    assert "not_honoured" not in answer
    asked["thinking"] = {"type": "adaptive", "display": "omitted"}
    for message in (ask(asked).json(), accumulated(events(ask(asked | {"stream": True})))):
        assert message["content"][0] == answer["content"][0] | {"thinking": ""}


# ---------------------------------------------------------------------- what the model is shown


def shown(messages, **more):
    """Return the turn that a request asks for."""
    return MessagesRequest(messages=messages, max_tokens=9, **more).turn(SamplingParams())


USER = {"role": "user", "content": "hi"}


def test_a_conversation_with_calls_results_images_and_errors():
    turn = shown(
        [
            {"role": "user", "content": [{"type": "text", "text": "look"}, PIXEL]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I call."},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"city": "Ö"}},
                    {"type": "tool_use", "id": "b", "name": "g", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "warm"}, PIXEL]},
                    {"type": "tool_result", "tool_use_id": "b", "content": "no such file", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "c"},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"city": "Ö"})}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert turn.messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, image]},
        {"role": "assistant", "content": "I call.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no such file"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": [image, {"type": "text", "text": "go on"}]},
    ]
    assert turn.names.images == ["messages.0.content.1.source", "messages.2.content.0.content.1.source"]


def test_an_image_inside_other_blocks_is_named_by_its_path():
    document = {"type": "document", "source": {"type": "content", "content": [PIXEL]}}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "redacted_thinking"}, PIXEL]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [document]}
    names = shown([{"role": "user", "content": [document, PIXEL, found]}, {"role": "user", "content": [result]}]).names
    at = "messages.0.content"
    paths = [
        f"{at}.0.source.content.0",
        f"{at}.1",
        f"{at}.2.content.1",
        "messages.1.content.0.content.0.source.content.0",
    ]
    assert names.images == [f"{path}.source" for path in paths]
    assert names.refusal(ValueError("image 2 of 4, a file: no")).param == f"{at}.1.source"
    assert names.refusal(ValueError("image 1 of 6: features of one part have more images than parts")).param is None


def test_neighbours_of_one_role_are_one_message():
    said = {"role": "assistant", "content": "b"}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    found = shown([USER, USER, said, call, USER]).messages
    assert [one["role"] for one in found] == ["user", "assistant", "user"]
    assert found[0]["content"] == "hi\nhi" and found[1]["content"] == "b" and len(found[1]["tool_calls"]) == 1


@pytest.mark.parametrize(
    "system",
    [
        lambda n: [{"type": "text", "text": LINE % n}, {"type": "text", "text": "You are"}],
        lambda n: [{"type": "text", "text": f"{LINE % n}\n\nYou are"}],
        lambda n: f"{LINE % n}\nYou are",
    ],
)
def test_the_line_that_changes_from_turn_to_turn_is_left_out(system):
    for n in (1, 2):
        assert shown([USER], system=system(n)).messages[0] == {"role": "system", "content": "You are"}
    amid = [USER, {"role": "system", "content": system(3)}, USER]
    assert shown(amid).messages[1] == {"role": "system", "content": "You are"}


def test_a_system_prompt_of_the_line_alone_is_none():
    assert [one["role"] for one in shown([USER], system=LINE % 1).messages] == ["user"]
    quoted = f"About {LINE % 1}"
    assert shown([USER], system=quoted).messages[0]["content"] == quoted


def test_marks_of_cached_prefixes_go_into_the_turn_and_change_no_token():
    text = {"type": "text", "text": "hi"}
    marked = shown(
        [{"role": "user", "content": [text | CACHED]}, {"role": "assistant", "content": "a"}, USER],
        system=[text | CACHED],
        tools=[F | CACHED],
    )
    messages = [{"role": "user", "content": [text]}, {"role": "assistant", "content": "a"}, USER]
    plain = shown(messages, system=[text], tools=[F])
    system, said = {"role": "system", "content": "hi"}, {"role": "user", "content": "hi"}
    assert [(list(one.messages), one.seconds) for one in marked.marked] == [
        ([system], 300.0),
        ([system], 300.0),
        ([system, said], 300.0),
    ]
    assert marked.messages == plain.messages and marked.tools == plain.tools and not plain.marked
    (whole,) = shown([USER], cache_control={"type": "ephemeral", "ttl": "1h"}).marked
    assert whole.messages == shown([USER]).messages and whole.seconds == 3600.0


def test_a_mark_cuts_the_conversation_where_it_stands():
    a, b = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [a | CACHED, b]}
    turn = shown(
        [
            {"role": "user", "content": [a | CACHED, b]},
            {"role": "assistant", "content": [a, call]},
            {"role": "user", "content": [result, b | CACHED]},
        ]
    )
    ends = [one.messages[-1] for one in turn.marked]
    assert [(one["role"], one["content"]) for one in ends] == [("user", "a"), ("tool", "a\nb"), ("user", "b")]
    assert [len(one.messages) for one in turn.marked] == [1, 3, 4]


def test_more_marks_than_anthropic_takes_are_refused():
    text = {"type": "text", "text": "a"} | CACHED
    assert ask(body(system=[text] * 4)).status_code == 200
    refused = ask(body(system=[text] * 5))
    assert refused.status_code == 400 and "the request has 5" in refused.json()["error"]["message"]


def test_the_beginning_of_an_answer_is_continued():
    begun = {"role": "assistant", "content": "The answer is ("}
    turn = shown([USER, begun])
    assert turn.continues_message and turn.messages[-1]["content"] == "The answer is ("
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    assert not shown([USER, call]).continues_message and not shown([USER]).continues_message


@pytest.mark.parametrize(
    ("choice", "mode", "names", "parallel"),
    [
        (None, "auto", None, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", None, False),
        ({"type": "any"}, "required", None, True),
        ({"type": "tool", "name": "f"}, "required", ("f",), False),
        ({"type": "none"}, "none", None, True),
    ],
)
def test_tool_choices(choice, mode, names, parallel):
    turn = shown([USER], tools=[F, G], tool_choice=choice)
    assert (turn.choice.mode, turn.choice.names, turn.choice.parallel) == (mode, names, parallel)
    function = {"name": "f", "description": "about", "parameters": CITY}
    assert turn.tools[0].shown() == {"type": "function", "function": function}


def test_parameters_and_shapes():
    schema = {"type": "object", "properties": {}}
    turn = shown(
        [USER],
        stop_sequences=["a"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
    )
    params = turn.params
    assert (params.stop, params.temperature, params.top_p, params.top_k, params.max_tokens) == (("a",), 0.5, 0.9, 3, 9)
    assert turn.shape.json == schema and turn.controls["reasoning_effort"] == "low"
    assert shown([USER], thinking={"type": "disabled"}).controls["thinks"] is False


# ---------------------------------------------------------------------- errors, keys, names


WRONG = {
    "prompt is too long: 508 tokens > 400 maximum": {"messages": [{"role": "user", "content": "#text# " * 500}]},
    "max_tokens=0 must be at least 1": {"max_tokens": 0},
    "max_tokens: Field required": {"max_tokens": None},
    "Unrecognized request argument supplied: temprature": {"temprature": 1},
    "messages.0.content.0.type": {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
    "messages.0.content.0: a block of type 'text' needs": {
        "messages": [{"role": "user", "content": [{"type": "text"}]}]
    },
    "messages has no message of the user": {"messages": [{"role": "system", "content": "a"}]},
    "messages.0.content.0 has the type 'tool_use'": {
        "messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]
    },
    "messages.0.content.0 is an image": {"messages": [{"role": "assistant", "content": [PIXEL]}]},
    "system.0 has an image": {"system": [PIXEL]},
    "stop_sequences=": {"stop_sequences": [""]},
    "tool_choice names 'x'": {"tools": [F], "tool_choice": {"type": "tool", "name": "x"}},
    "tools has two functions of one name": {"tools": [F, F]},
}
FAILED = {
    "busy": (429, "rate_limit_error"),
    "dead": (503, "overloaded_error"),
    "slow": (504, "timeout_error"),
    "broken": (500, "api_error"),
}


def test_errors_have_the_apis_form():
    _, app = server()
    asked = [(message, 400, "invalid_request_error", body(**wrong)) for message, wrong in WRONG.items()]
    asked += [("", *said, body(script)) for script, said in FAILED.items()]
    asked.append(("The model `gpt` does not exist", 404, "not_found_error", body(model="gpt")))
    for message, status, kind, wrong in asked:
        answer = ask(wrong, app=app, **{"X-Request-Id": "r"})
        found = answer.json()
        assert (answer.status_code, found["type"], found["error"]["type"]) == (status, "error", kind), found
        assert found["error"]["message"].startswith(message) and found["request_id"] == "r"
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == "r"  # the API's clients read the first
    found = events(ask(body("broken", stream=True), app=app))
    assert found[0]["type"] == "message_start" and found[-1]["error"]["type"] == "api_error"


def test_a_text_that_is_far_too_long_has_its_tokens_estimated():
    class Long(ScriptedModel):
        def chat_prompt(self, messages, **options):
            raise ValueError(
                "the prompt has 9000 characters, of which the first 900 have 500 tokens, more than max_model_len=400"
            )

    app = create_app(Long(SCRIPTS), ServerSettings(model="tiny"))
    found = ask(body(model="tiny"), app=app).json()["error"]["message"]
    assert found == "prompt is too long: 5000 tokens > 400 maximum"


def test_a_key_comes_in_its_own_header_or_as_a_bearers():
    _, app = server(keys=(Key.of("one", "alice"),))
    assert ask(body(), app=app, **{"x-api-key": "one"}).status_code == 200
    assert ask(body(), app=app, Authorization="Bearer one").status_code == 200
    for headers in ({}, {"x-api-key": "two"}, {"x-api-key": "two", "Authorization": "Bearer one"}):
        refused = ask(body(), app=app, **headers)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert "x-api-key: KEY" in refused.json()["error"]["message"]


def test_models_are_listed_in_the_form_of_the_client():
    model, app = server(keys=(Key.of("one", "alice"),))
    own = {"anthropic-version": "2023-06-01", "x-api-key": "one"}
    listed = ask(None, "/v1/models", app, "GET", **own).json()
    first, last = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "claude-*")
    assert first | {"created_at": ""} == {
        "type": "model",
        "id": "tiny",
        "display_name": "tiny",
        "created_at": "",
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }
    assert abs(datetime.fromisoformat(first["created_at"]).timestamp() - time.time()) < 1000
    assert ask(None, "/v1/models/tiny", app, "GET", **own).json() == first and last["id"] == "claude-*"
    for path in ("/v1/models/no", "/v1/files"):
        refused = ask(None, path, app, "GET", **own)
        assert refused.status_code == 404 and refused.json()["error"]["type"] == "not_found_error"
        assert refused.json()["type"] == "error"
    refused = ask(None, "/v1/models", app, "GET", **own | {"x-api-key": "two"})
    assert refused.status_code == 401 and refused.json()["type"] == "error"
    others = {"x-api-key": "one", "Authorization": "Bearer one"}
    assert ask(None, "/v1/models", app, "GET", **others).json()["object"] == "list"
    assert ask(None, "/v1/models", app, "GET", **{"x-api-key": "one"}).status_code == 401
    chat = {"model": "tiny", "messages": [], "nope": 1}
    assert "param" in ask(chat, "/v1/chat/completions", app, **own | others).json()["error"], "the path decides"


def test_a_served_name_may_be_a_pattern():
    _, app = server()
    statuses = {"claude-opus-4": 200, "claude-": 200, "tiny": 200, "claude": 404, "a claude-x": 404, "tinyx": 404}
    for name, status in statuses.items():
        answer = ask(body(model=name), app=app)
        assert answer.status_code == status and (status != 200 or answer.json()["model"] == name)
    assert ask(body(model="claude-x", max_tokens=9), "/v1/chat/completions", app).status_code == 200
    settings = ServerSettings(model="m", aliases=("a.c*", "[x]*"))
    assert settings.has("a.cd") and settings.has("[x]y") and not settings.has("abcd") and not settings.has("x")


def test_fields_that_are_not_honoured_are_named_and_strict_servers_refuse_them():
    more = {"context_management": {"edits": []}, "tools": [F, {"type": "web_search_20250305", "name": "web_search"}]}
    named = ask(body(**more)).json()["not_honoured"]
    assert named.keys() == {"context_management", "tools.1"}
    _, strict = server(strict_fields=True)
    assert ask(body(**more), app=strict).status_code == 400
    assert "not_honoured" not in ask(body(metadata={"user_id": "u"}, service_tier="auto", diagnostics={})).json()


# ---------------------------------------------------------------------- invariants

TEXT = st.text("ab\né", min_size=1, max_size=5)


@st.composite
def answers(draw):
    """Return the events of an answer, in any order that a turn's events may have."""
    found, calls = [Begun(5, 2)], 0
    for kind in draw(st.lists(st.sampled_from(["thought", "text", "call"]), max_size=6)):
        if kind == "call":
            arguments = json.dumps(draw(st.dictionaries(TEXT, TEXT, max_size=2)))
            at = draw(st.integers(0, len(arguments)))
            pieces = [piece for piece in (arguments[:at], arguments[at:]) if piece]
            found += [CallBegun(calls, "f"), *(Arguments(calls, piece) for piece in pieces), CallEnded(calls)]
            calls += 1
        else:
            found.append((Thought if kind == "thought" else Text)(draw(TEXT)))
    return [*found, Ended("calls" if calls else "stop", None, 5, 2, 9, 1)]


class Delta(str):
    """A text that must not be added to another: with every delta the whole answer would be copied."""

    def __radd__(self, other):
        raise AssertionError("the text so far is copied")


def test_no_delta_copies_the_answer_so_far():
    pieces = [Delta(piece) for piece in ('{"a', '": ', "1}")]
    given_events = [
        *[kind(piece) for kind in (Thought, Text) for piece in pieces],
        *[CallBegun(0, "f"), *[Arguments(0, piece) for piece in pieces], CallEnded(0)],
    ]
    blocks, items, whole = MessageBlocks({}, "id", 100, omits_thoughts=False), Items("id"), '{"a": 1}'
    for event in given_events:
        assert list(blocks.add(event)) and (list(items.add(event)) or isinstance(event, CallEnded))
        items.all  # noqa: B018 - a client may read the response at any time
    thought, text, call = blocks.message["content"]
    assert (thought["thinking"], text["text"], call["input"]) == (whole, whole, {"a": 1})
    thought, text, call = items.all
    assert [one["content"][0]["text"] for one in (thought, text)] == [whole, whole] and call["arguments"] == whole


@given(answers(), st.booleans())
@settings(max_examples=examples(80), deadline=None)
def test_any_events_become_blocks_in_order(given_events, omits):
    blocks = MessageBlocks({"model": "m"}, "id", 100, omits_thoughts=omits)
    pairs = [each for event in given_events for each in blocks.add(event)]
    made = [{"type": kind, **json.loads(json.dumps(fields))} for kind, fields in pairs]
    assert accumulated(made) == blocks.message
    texts = "".join(block["text"] for block in blocks.message["content"] if block["type"] == "text")
    assert texts == "".join(event.text for event in given_events if isinstance(event, Text))
    again = {"role": "assistant", "content": blocks.message["content"]}
    if blocks.message["content"]:  # what a client sends back is taken
        CountRequest(messages=[USER, again]).turn(SamplingParams())

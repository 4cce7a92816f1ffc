"""Fields that the server knows but does not apply: dropped, named in the answer, or refused, each by the table."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from renderings import tokenizer_of

from jpaged import SamplingParams
from jpaged.server.anthropic.bodies import MessagesRequest
from jpaged.server.anthropic.field_classes import TABLE as OF_MESSAGES
from jpaged.server.bodies import unhonoured
from jpaged.server.messages.custom_tools import CustomInput
from jpaged.server.messages.turn_form import TurnForm
from jpaged.server.openai.bodies.field_classes import TABLE
from jpaged.server.turn import Turn

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
RESPOND = {"input": "hello", "max_output_tokens": 4, "temperature": 0}
WEB = {"type": "web_search"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False


@pytest.fixture
def with_tools(serve, tiny_llm, monkeypatch):
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + tiny_llm.tokenizer.chat_template
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", template)
    return serve


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def test_fields_without_effect_change_no_token_and_are_not_named(server):
    plain = text_of(server.answer(CHAT, ASKED))
    cached = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "hello", **cached}
    message = {"role": "user", "content": [part], "id": "m", "provider_specific_fields": {}, "reasoning_details": []}
    fields = {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "metadata": {"a": 1}, "store": False}
    answer = server.answer(CHAT, {**ASKED, "messages": [message | cached], "client_metadata": {}, **fields})
    assert text_of(answer) == plain and "not_honoured" not in answer
    fields = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "prompt_cache_key": "k"}
    answer = server.answer(RESPONSES, RESPOND | fields)
    assert answer["output"][0]["content"][0]["text"] == plain and "not_honoured" not in answer


def test_fields_that_are_not_honoured_are_named_in_every_answer(server):
    fields = {"store": True, "verbosity": "low", "reasoning_effort": "high", "web_search_options": {}, "tools": [WEB]}
    named = server.answer(CHAT, ASKED | fields)["not_honoured"]
    assert named.keys() == {"store", "verbosity", "reasoning_effort", "web_search_options", "tools.0"}
    assert named["tools.0"] == "web_search: the server has no such tool"
    for chunk in server.chunks(CHAT, ASKED | fields):
        assert chunk["not_honoured"] == named
    fields = {"text": {"verbosity": "low"}, "reasoning": {"effort": "high"}, "tools": [WEB]}
    fields |= {"include": ["web_search_call.results"], "stream_options": {"include_obfuscation": True}}
    response = server.answer(RESPONSES, RESPOND | fields)
    want = {"text.verbosity", "reasoning.effort", "tools.0", "include.0", "stream_options.include_obfuscation"}
    assert response["not_honoured"].keys() == want
    assert server.http.get(f"{RESPONSES}/{response['id']}").json()["not_honoured"] == response["not_honoured"]


def test_a_strict_server_refuses_what_it_would_not_honour(serve):
    server = serve(strict_fields=True)
    for path, body, param in (
        (CHAT, ASKED | {"store": True}, "store"),
        (CHAT, ASKED | {"verbosity": "low"}, "verbosity"),
        (CHAT, ASKED | {"tools": [WEB]}, "tools.0"),
        (RESPONSES, RESPOND | {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ):
        assert server.refusal(path, body)["param"] == param
    assert server.answer(CHAT, ASKED | {"metadata": {"a": 1}, "store": False})


def test_controls_that_the_template_has_are_applied(serve, tiny_llm, monkeypatch):
    shown = "{{ reasoning_effort or '' }}{{ verbosity or '' }}{% if enable_thinking is false %}none{% endif %}"
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", shown + tiny_llm.tokenizer.chat_template)
    server = serve()
    plain = server.answer(CHAT, ASKED)["usage"]["prompt_tokens"]
    for fields in ({"reasoning_effort": "high"}, {"verbosity": "low"}):
        answer = server.answer(CHAT, ASKED | fields)
        assert "not_honoured" not in answer and answer["usage"]["prompt_tokens"] > plain
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", tiny_llm.tokenizer.chat_template.replace("effort", "x"))
    answer = server.answer(CHAT, ASKED | {"reasoning_effort": "none"})
    assert "not_honoured" not in answer and answer["usage"]["prompt_tokens"] > plain


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        ("{% if enable_thinking is false %}<think></think>{% endif %}", "enable_thinking"),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),  # as DeepSeek's
        ("{%- if tools %}{%- elif thinking %}Think.{%- endif %}", "thinking"),  # as Granite's
        ("{% if m.content and m.thinking %}{% elif 'thinking' in m %}{{ m['thinking'] }}{% endif %}no thinking", None),
    ],
)
def test_thoughts_are_switched_by_the_variable_of_the_template(template, switch):
    tokenizer = tokenizer_of()
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "hello"}]
    for controls, on in (({"thinks": True}, True), ({"thinks": False}, False), ({"reasoning_effort": "none"}, False)):
        form = TurnForm(Turn(messages=messages, params=SamplingParams(), controls=controls), tokenizer)
        options = form.template_options()["chat_template_kwargs"]
        assert options == (None if switch is None else {switch: on})


def test_fields_of_vllm_are_refused_with_what_to_send_and_a_request_id_is_named(server):
    for path, body in ((CHAT, ASKED), (TEXT, {"prompt": "hello", "max_tokens": 4})):
        for kind, value in (("json", {"type": "integer"}), ("regex", "a+"), ("choice", ["a"]), ("grammar", "g")):
            error = server.refusal(path, body | {f"guided_{kind}": value})
            assert error["param"] == f"guided_{kind}"
            assert f'give structured_outputs={{"{kind}": ...}}' in error["message"]
        assert "X-Request-Id" in server.answer(path, body | {"request_id": "a"})["not_honoured"]["request_id"]
    error = server.refusal(CHAT, ASKED | {"chat_template": "{{ 1 }}"})
    assert error["param"] == "chat_template" and "--chat-template" in error["message"]


def test_a_tool_choice_without_a_tool_that_is_left_is_refused(with_tools):
    server = with_tools(tool_parser="hermes")
    assert server.refusal(CHAT, ASKED | {"tools": [WEB], "tool_choice": "required"})["param"] == "tool_choice"
    for choice in ("required", WEB):
        assert server.refusal(RESPONSES, RESPOND | {"tools": [WEB], "tool_choice": choice})["param"].startswith("tool_")


def test_an_unknown_field_is_refused_by_its_path_and_with_the_nearest_name(server):
    error = server.refusal(CHAT, ASKED | {"tempature": 1})
    assert (error["param"], error["code"]) == ("tempature", "unknown_parameter")
    assert "did you mean temperature?" in error["message"]
    assert "did you mean max_output_tokens?" in server.refusal(RESPONSES, RESPOND | {"max_tokens": 1})["message"]
    part = {"type": "text", "text": "a", "cache_controll": {}}
    error = server.refusal(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert error["param"] == "messages.0.content.0.cache_controll" and "cache_control?" in error["message"]
    assert "did you mean" not in server.refusal(CHAT, ASKED | {"xyzzy": 1})["message"]
    assert len(server.refusal(CHAT, ASKED | {"x" * 5000: 1})["message"]) < 200


def test_a_top_p_of_zero_is_greedy_and_an_empty_suffix_is_none(server):
    greedy = server.complete(temperature=0)["choices"][0]["text"]
    assert server.complete(top_p=0, temperature=1.0, seed=1)["choices"][0]["text"] == greedy
    assert server.complete(temperature=0, suffix="")["choices"][0]["text"] == greedy


def test_a_json_object_may_have_its_schema_inside(server):
    form = {"type": "json_object", "schema": CITY}
    answer = server.answer(CHAT, ASKED | {"response_format": form, "max_tokens": 60})
    assert json.loads(text_of(answer)) == {"city": "Rome"}


CUSTOM = {
    "name": "run",
    "description": "runs it",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}"},
}


def test_a_custom_tool_is_called_with_an_input(with_tools):
    server = with_tools(tool_parser="hermes")
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-c]{3}"}}
    tools = [{"type": "custom", "custom": {**CUSTOM, "format": grammar}}]
    asked = ASKED | {"tools": tools, "tool_choice": {"type": "custom", "custom": {"name": "run"}}, "max_tokens": 80}
    (call,) = server.answer(CHAT, asked)["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"]["name"] == "run" and set(call["custom"]["input"]) <= set("abc")
    pieces = [c for chunk in server.chunks(CHAT, asked) for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(piece["custom"]["input"] for piece in pieces) == call["custom"]["input"]
    history = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": call["id"], "content": "done"}]
    assert server.answer(CHAT, ASKED | {"messages": [*ASKED["messages"], *history]})


def test_responses_take_custom_tools_and_namespaces(with_tools):
    server = with_tools(tool_parser="hermes")
    tools = [{"type": "custom", **CUSTOM}]
    asked = RESPOND | {"tools": tools, "tool_choice": {"type": "custom", "name": "run"}, "max_output_tokens": 80}
    response = server.answer(RESPONSES, asked)
    (call,) = response["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "run") and len(call["input"]) == 3
    with server.http.stream("POST", RESPONSES, json=asked | {"stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call["input"]
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    assert server.answer(RESPONSES, RESPOND | {"input": [output], "previous_response_id": response["id"]})
    lark = {**tools[0], "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}
    assert "format" in str(server.answer(RESPONSES, RESPOND | {"tools": [lark]})["not_honoured"])

    space = {"type": "namespace", "name": "city", "description": "towns"}
    space["tools"] = [{"type": "function", "name": "find", "parameters": CITY}]
    asked = RESPOND | {"tools": [space], "tool_choice": "required", "parallel_tool_calls": False}
    response = server.answer(RESPONSES, asked | {"max_output_tokens": 90})
    (call,) = response["output"]
    assert (call["name"], call["namespace"], call["arguments"]) == ("find", "city", '{"city": "Rome"}')
    items = [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}, call]
    items += [{"type": "function_call_output", "call_id": call["call_id"], "output": "1"}]
    items += [{"type": "web_search_call", "id": "w", "status": "completed", "action": {}}]
    answer = server.answer(RESPONSES, RESPOND | {"input": [{"role": "user", "content": "hi"}, *items]})
    assert answer["not_honoured"].keys() == {"input.4"}


def test_answers_have_ids_of_their_own_where_a_gateway_repeats_the_requests(with_tools):
    server = with_tools(tool_parser="hermes")
    tools = [{"type": "function", "function": {"name": "find", "parameters": CITY}}]
    ids = []
    for _ in range(2):
        headers = {"X-Request-Id": "same"}
        answer = server.http.post(
            CHAT, json=ASKED | {"tools": tools, "tool_choice": "required", "max_tokens": 60}, headers=headers
        )
        assert answer.headers["x-request-id"] == "same"
        ids += [answer.json()["id"], answer.json()["choices"][0]["message"]["tool_calls"][0]["id"]]
        answer = server.http.post(RESPONSES, json=RESPOND, headers=headers).json()
        ids += [answer["id"], answer["output"][0]["id"]]
        ids += [server.http.post(TEXT, json={"prompt": "a", "max_tokens": 1}, headers=headers).json()["id"]]
    assert len(set(ids)) == len(ids) == 10


def test_paths_that_clients_try_are_there(server):
    assert server.http.get("/ping").json() == {"status": "ok"}
    assert server.http.get("/v1/models/").json() == server.http.get("/v1/models").json()
    answer = server.http.get("/v1/models", headers={"Host": "evil.example:80"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_host"
    assert "--api-key" in answer.json()["error"]["message"]


def test_a_conversation_that_is_too_long_loses_its_oldest_messages_where_truncation_is_auto(server):
    turns = [{"role": role, "content": f"t{i}"} for i in range(40) for role in ("user", "assistant")]
    asked = RESPOND | {"instructions": "be kind", "input": [*turns, {"role": "user", "content": "hello"}]}
    assert "max_model_len" in server.refusal(RESPONSES, asked)["message"]
    answer = server.answer(RESPONSES, asked | {"truncation": "auto"})
    assert answer["truncation"] == "auto" and 60 < answer["usage"]["input_tokens"] <= 96


@given(st.text(st.characters(codec="utf-8")), st.booleans(), st.lists(st.integers(1, 9), min_size=1))
def test_the_input_of_a_custom_tool_is_read_however_it_is_cut_up(text, plain, sizes):
    arguments, reader, found, at, i = json.dumps({"input": text}, ensure_ascii=plain), CustomInput(), "", 0, 0
    while at < len(arguments):
        size = sizes[i % len(sizes)]
        found, at, i = found + reader.push(arguments[at : at + size]), at + size, i + 1
    assert found == text


def test_half_of_a_pair_of_surrogates_ends_no_input():
    reader = CustomInput()
    assert (
        "".join(map(reader.push, r'{"input": "a\ud83d b\ud83d\u0041\ud83d\ude00\udc00!"}'))
        == "a\ufffd b\ufffdA\U0001f600\ufffd!"
    )


def test_two_tools_of_one_name_are_refused(with_tools):
    server = with_tools(tool_parser="hermes")
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    inside = {"type": "namespace", "name": "a", "tools": [tool]}
    for tools, name in (([tool, tool], "f"), ([inside, tool | {"name": "a.f"}], "a.f")):
        assert name in server.refusal(RESPONSES, RESPOND | {"tools": tools})["message"]


def test_a_pattern_that_cannot_be_followed_is_named(with_tools):
    form = {"type": "grammar", "syntax": "regex", "definition": r"\bgit (?!push).*"}
    tools = [{"type": "custom", "name": "shell", "format": form}]
    answer = with_tools(tool_parser="hermes").answer(RESPONSES, RESPOND | {"tools": tools, "tool_choice": "none"})
    assert any("cannot be followed" in reason for reason in answer["not_honoured"].values())


def test_fields_of_a_message_that_only_anthropics_servers_follow_are_dropped_or_named():
    thinking = {"type": "adaptive", "display": "updates", "block_binding": {}}
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "compaction", "content": "a"}, {"type": "text", "text": "b"}]}
        ],
        "max_tokens": 1,
        "billing_policy": {"type": "billing_policy"},
        "fallbacks": [{"model": "other"}],
        "output_config": {"task_budget": {"type": "tokens", "total": 1}},
        "thinking": thinking,
        "tools": [{"type": "tool_search_tool_regex", "name": "search"}],
    }
    found = unhonoured(MessagesRequest.model_validate(body))
    assert found.keys() == {"fallbacks", "messages.0.content.0", "output_config.task_budget", "tools.0"}
    image = {"type": "image", "source": {"type": "file", "file_id": "a"}}
    asked = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
    for more, said in ((asked, "there are no files"), ({"thread": {"type": "create"}}, "send the whole conversation")):
        with pytest.raises(ValidationError, match=said):
            MessagesRequest.model_validate(body | more)


def test_the_documents_table_is_the_servers():
    page = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for name, classes in (TABLE | OF_MESSAGES).items():
        for what, fields in (
            ("without effect", classes.without_effect),
            ("not honoured", classes.not_honoured),
            ("refused", classes.refused),
        ):
            if fields:
                assert f"| {name} | {what} | {', '.join(f'`{field}`' for field in sorted(fields))} |" in page

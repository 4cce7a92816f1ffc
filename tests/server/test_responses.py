"""`/v1/responses` says what the chat of the same conversation says, whole and event by event."""

import openai
import pytest

from jpaged.server.openai.bodies.responses import ResponsesRequest

PATH = "/v1/responses"
BODY = {"model": "tiny", "input": "hello", "instructions": "be kind", "max_output_tokens": 12, "seed": 3}
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


def chatted(server, **options):
    return server.chat(**{"messages": MESSAGES, "max_tokens": 12, "seed": 3} | options)["choices"][0]["message"]


def test_a_response_is_what_the_chat_says(server):
    response = server.answer(PATH, BODY)
    (item,) = response["output"]
    assert item["content"][0]["text"] == chatted(server)["content"] and item["role"] == "assistant"
    assert response["usage"]["output_tokens"] == 12 and response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_official_client_gets_every_event_in_order(server):
    want = chatted(server)["content"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        events = list(
            client.responses.create(
                **{n: v for n, v in BODY.items() if n != "seed"}, stream=True, extra_body={"seed": 3}
            )
        )
        whole = client.responses.create(**{n: v for n, v in BODY.items() if n != "seed"}, extra_body={"seed": 3})
    assert whole.output_text == want
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == want
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == want and events[0].response.output == []


def test_a_conversation_goes_on_with_the_items_of_a_response(server):
    first = server.answer(PATH, BODY)
    items = [{"role": "user", "content": "hello"}, *first["output"], {"role": "user", "content": "and then"}]
    turns = [*MESSAGES, {"role": "assistant", "content": first["output"][0]["content"][0]["text"]}]
    want = chatted(server, messages=[*turns, {"role": "user", "content": "and then"}])
    assert server.answer(PATH, BODY | {"input": items})["output"][0]["content"][0]["text"] == want["content"]


def test_a_shape_is_followed_and_ends_the_response(server):
    form = {"type": "json_schema", "name": "a", "schema": {"const": {"yes": True}}, "strict": True}
    response = server.answer(PATH, BODY | {"text": {"format": form}, "max_output_tokens": 60})
    assert response["status"] == "completed" and response["incomplete_details"] is None
    assert response["output"][0]["content"][0]["text"].replace(" ", "") == '{"yes":true}'


def test_a_function_is_called(serve, tiny_llm, monkeypatch):
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + tiny_llm.tokenizer.chat_template
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", template)
    server = serve(tool_parser="llama3")
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "name": "weather", "parameters": schema | {"additionalProperties": False}}]
    body = BODY | {"tools": tools, "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 90}
    (call,) = server.answer(PATH, body)["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Rome"}')
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    later = BODY | {"input": [{"role": "user", "content": "a"}, call, result], "min_tokens": 1}
    assert server.answer(PATH, later)["output"]


def test_what_is_not_done_is_refused_by_name(server):
    for name, value in (
        ("conversation", "conv_1"),
        ("prompt", {"id": "p"}),
        ("include", ["a"]),
        ("top_logprobs", 2),
        ("metadata", {"a": 1}),
        ("max_tool_calls", 2),
        ("nonsense", 1),
        ("tools", [{"type": "function", "name": "a b"}]),
        ("input", [{"type": "function_call", "name": "f"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]),
        ("input", [{"role": "system", "content": [{"type": "input_image", "image_url": "data:,"}]}]),
        ("temperature", -1.0),
    ):
        error = server.refusal(PATH, BODY | {name: value})
        assert name in (error["param"] or "") or name in error["message"] or error["param"] in ("verbosity", "file_id")
    assert server.refusal(PATH, BODY | {"background": True, "store": False})["param"] == "background"


IMAGE = {"type": "input_image", "image_url": "data:,"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "rain"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (OUTPUT | {"output": [{"type": "input_text", "text": "see"}, IMAGE]}, "input.1.output.1.image_url"),
        (THOUGHT | {"content": [IMAGE]}, "input.1.content.0"),
        (THOUGHT | {"role": "assistant"}, "input.1.role"),
        (OUTPUT | {"name": "f"}, "input.1.name"),
        (OUTPUT | {"arguments": "{}"}, "input.1.arguments"),
        ({"role": "user", "content": "a", "call_id": "c"}, "input.1.call_id"),
        ({"role": "user", "content": "a", "output": "b"}, "input.1.output"),
        ({"role": "assistant", "content": "a", "summary": []}, "input.1.summary"),
    ],
)
def test_what_an_item_has_no_use_for_is_refused_by_name(server, item, param):
    assert server.refusal(PATH, BODY | {"input": [{"role": "user", "content": "hello"}, item]})["param"] == param


def test_a_format_has_what_its_type_says(server):
    for kind in ("text", "json_object"):
        form = {"type": kind, "schema": {"type": "object"}}
        assert server.refusal(PATH, BODY | {"text": {"format": form}})["param"] == "text.format.schema"


def messages(*items):
    chat = ResponsesRequest(input=list(items)).as_chat()
    return [message.model_dump(exclude_unset=True) for message in chat.messages]


def test_no_thought_of_a_conversation_is_lost():
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    alone = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert messages(user, THOUGHT, said) == [user, said | {"reasoning_content": "hm"}]
    assert messages(user, THOUGHT, user) == [user, alone, user] and messages(user, THOUGHT) == [user, alone]
    assert messages(user, THOUGHT, THOUGHT, said)[1]["reasoning_content"] == "hm\nhm"
    first, second = messages(user, said, THOUGHT, call)[1:]
    assert first == said and second["reasoning_content"] == "hm" and second["tool_calls"][0]["id"] == "c"
    assert messages(user, said, call)[1].keys() == {"role", "content", "tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_gets_a_status(server, stream):
    assert "max_model_len=128" in server.refusal(PATH, BODY | {"input": "abc " * 200, "stream": stream})["message"]


@pytest.mark.parametrize("given", [{}, {"arguments": None}, {"arguments": "{}"}])
def test_a_call_of_an_earlier_turn_may_have_no_arguments(given):
    call = {"type": "function_call", "call_id": "c", "name": "f", **given}
    items = ResponsesRequest(input=[{"role": "user", "content": "hi"}, call]).input
    items[1].check("input.1")
    assert items[1].message("input.1")["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}

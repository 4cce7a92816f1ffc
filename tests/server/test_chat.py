"""`/v1/chat/completions`, the official client, and what else is asked over HTTP."""

import json
from pathlib import Path

import openai
import pydantic
import pytest

from jpaged import SamplingParams, __version__

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
BODY = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "seed": 3, "ignore_eos": True}


def said(chunks):
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


def test_an_answer_is_what_the_engine_says_to_the_conversation(tiny_llm, server_after):
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    want = tiny_llm.chat(MESSAGES, params, use_tqdm=False)[0]
    answer = server_after().answer(PATH, BODY)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": want.outputs[0].text, "refusal": None}
    assert choice["finish_reason"] == "length" and answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(want.prompt_token_ids)


def test_a_stream_says_what_the_whole_answer_says(server):
    whole = server.answer(PATH, BODY)
    chunks = server.chunks(PATH, BODY | {"stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert said(chunks) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)


def test_an_answer_without_a_limit_goes_on_to_the_end_of_the_context(server):
    body = {name: value for name, value in BODY.items() if name != "max_completion_tokens"}
    assert server.answer(PATH, body)["usage"]["total_tokens"] == 128


def test_minus_one_asks_for_the_whole_vocabulary_as_in_vllm(serve, tiny_llm, monkeypatch):
    server = serve()
    wanted = {PATH: {"logprobs": True, "top_logprobs": -1}, "/v1/completions": {"logprobs": -1}}
    chat, text = {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}, {"max_tokens": 2, "prompt": "a"}
    for (path, more), body, name in zip(wanted.items(), (chat, text), ("top_logprobs", "logprobs"), strict=True):
        error = server.refusal(path, body | more)
        all_of = f"{name}=-1, all {tiny_llm.vocab_size} tokens, is above the engine's max_logprobs=20"
        assert error["param"] == name and all_of in error["message"], error
        assert f"{name}=-2" in server.refusal(path, body | more | {name: -2})["message"]
    monkeypatch.setattr(tiny_llm.input_processor, "_max_logprobs", -1)
    for path, body in ((PATH, chat), ("/v1/completions", text)):
        found = server.answer(path, body | wanted[path] | {"ignore_eos": True})["choices"][0]["logprobs"]
        tops = [entry["top_logprobs"] for entry in found["content"]] if path == PATH else found["top_logprobs"]
        distinct = len({tiny_llm.tokenizer.decode([token]) for token in range(tiny_llm.vocab_size)})
        assert [len(top) for top in tops] == [tiny_llm.vocab_size if path == PATH else distinct] * 2


def test_logprobs_have_openais_form(server):
    entries = server.answer(PATH, BODY | {"logprobs": True, "top_logprobs": 2, "temperature": 0})["choices"][0]
    content = entries["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == entries["message"]["content"]
    for entry in content:
        assert entry["bytes"] == list(entry["token"].encode()) and len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
    plain = server.answer(PATH, BODY | {"logprobs": True})["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[]] * 12


def test_the_last_message_is_continued(server):
    begun = [*MESSAGES, {"role": "assistant", "content": "the cab "}]
    body = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    tokens = server.answer("/tokenize", body)["tokens"]
    prompt = server.answer("/detokenize", {"tokens": tokens})["prompt"]
    assert prompt.rstrip().endswith("assistant: the cab")
    answer = server.answer(PATH, BODY | {"messages": begun, "continue_final_message": True})
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_tokens_and_text_are_told_apart_and_together(server):
    told = server.answer("/tokenize", {"prompt": "the cab", "return_token_strs": True})
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) and told["max_model_len"] == 128
    assert server.answer("/detokenize", {"tokens": told["tokens"]}) == {"prompt": "the cab"}
    assert server.refusal("/detokenize", {"tokens": [211]})["param"] == "tokens"
    assert server.refusal("/tokenize", {"prompt": "a", "messages": MESSAGES})["param"] == "prompt"
    assert server.refusal("/tokenize", {"prompt": "a", "continue_final_message": True})["param"]


def test_the_server_says_what_it_is(server):
    assert server.http.get("/version").json() == {"version": __version__}
    assert server.http.get("/health").json() == {"status": "ok"}
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], server.http.get("/v1/models/tiny").json()) == ("tiny", 128, model)
    load = server.http.get("/v1/load").json()
    assert load["running"] == load["waiting"] == load["active"] == 0


def test_metrics_have_vllms_names_and_count_every_request(server):
    server.chat()
    server.chunks(PATH, BODY)
    text = server.http.get("/metrics").text
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert f'jpaged:{name}_count{{model_name="tiny"}} 2.0' in text
    assert 'jpaged:inter_token_latency_seconds_count{model_name="tiny"} 11.0' in text
    assert 'jpaged:num_requests_running{model_name="tiny"} 0.0' in text
    assert "jpaged:generation_tokens_total" in text and 'jpaged:kv_blocks{group="' in text
    assert "jpaged:step_time_seconds_bucket" in text


# ---------------------------------------------------------------------- the official client


class Answer(pydantic.BaseModel):
    """What a model is asked to fill in."""

    yes: bool


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_talks_and_streams(client, server):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=12, seed=3)
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=12, seed=3, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content and answer.usage.completion_tokens <= 12
    assert [model.id for model in client.models.list()] == ["tiny"]
    done = client.completions.create(model="tiny", prompt="a", max_tokens=4, extra_body={"top_k": 1, "min_tokens": 4})
    assert done.usage.completion_tokens == 4


def test_the_official_client_parses_answers_into_pydantic_models(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Answer, max_completion_tokens=60, logit_bias={"40": -100}
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(answer.choices[0].message.parsed, Answer)
    schema = {"name": "answer", "schema": {"const": {"yes": True}}, "strict": True}
    fixed = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_schema", "json_schema": schema}
    )
    assert json.loads(fixed.choices[0].message.content) == {"yes": True}
    assert fixed.choices[0].finish_reason == "stop"


def test_the_official_client_knows_the_errors(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature" and refused.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_the_official_client_streams_asynchronously(server):
    import asyncio

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(seed):
                stream = await client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_completion_tokens=12, seed=seed, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(seed % 3) for seed in range(9)))

    texts = asyncio.run(main())
    assert texts[:3] * 3 == texts and len(set(texts)) == 3


def test_what_stands_in_the_docs_is_what_the_app_has(server):
    """Every path that docs/serving.md names is there."""
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= paths.keys()
    docs = Path(__file__).parents[2] / "docs" / "serving.md"
    assert all(f"`{path}`" in docs.read_text() for path in paths if "{" not in path)


# ---------------------------------------------------------------------- tools and thoughts

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


BAD = {"type": "object", "properties": {"a": {"type": "objekt"}}}


@pytest.fixture
def with_tools(serve, tiny_llm, monkeypatch):
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + tiny_llm.tokenizer.chat_template
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", template)
    return serve


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_a_named_tool_is_called_with_arguments_of_its_schema(with_tools, family):
    server = with_tools(tool_parser=family)
    body = BODY | {"tools": TOOLS, "max_completion_tokens": 140, "ignore_eos": False}  # an id of Mistral's included
    body["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    choice = server.answer(PATH, body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'} and call["id"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    deltas = [chunk["choices"][0] for chunk in server.chunks(PATH, body)]
    calls = [call for one in deltas for call in one["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "weather" and calls[0]["type"] == "function"
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Rome"}'
    assert deltas[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_a_call_that_a_stop_string_cuts_is_not_reported_as_complete(with_tools, family):
    server = with_tools(tool_parser=family)
    body = BODY | {"tools": TOOLS, "max_completion_tokens": 90, "ignore_eos": False, "stop": ["city"]}
    body["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    choice = server.answer(PATH, body)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "city")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"'}
    assert server.chunks(PATH, body)[-1]["choices"][0]["finish_reason"] == "stop"
    asked = {"input": "hi", "max_output_tokens": 90, "stop": ["city"], "store": False}
    asked["tools"] = [{"type": "function", **TOOLS[0]["function"]}]
    response = server.answer("/v1/responses", asked | {"tool_choice": "required"})
    assert response["output"][0]["arguments"] == '{"' and response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_a_call_that_is_cut_in_its_name_leaves_no_markup(with_tools, family):
    server = with_tools(tool_parser=family)
    body = BODY | {"tools": TOOLS, "tool_choice": "required", "ignore_eos": False}
    tokens = 5 if family == "llama3" else 18  # its calls have no mark before them
    for limit, reason in (({"max_completion_tokens": tokens}, "length"), ({"stop": ["name"]}, "stop")):
        choice = server.answer(PATH, body | {"max_completion_tokens": 90} | limit)["choices"][0]
        assert choice["finish_reason"] == reason
        assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}
        chunks = server.chunks(PATH, body | {"max_completion_tokens": 90} | limit)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ""
        assert chunks[-1]["choices"][0]["finish_reason"] == reason


def test_some_tool_is_called_where_one_is_required_and_one_only_if_asked(with_tools):
    server = with_tools(tool_parser="llama3")
    body = BODY | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "ignore_eos": False}
    calls = server.answer(PATH, body | {"max_completion_tokens": 90})["choices"][0]["message"]["tool_calls"]
    assert len(calls) == 1 and calls[0]["function"]["name"] in ("weather", "now")


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_of_allowed_tools_one_is_called_and_the_prompt_has_all(with_tools):
    server = with_tools(tool_parser="hermes")
    body = BODY | {"tools": TOOLS, "parallel_tool_calls": False, "max_completion_tokens": 90, "ignore_eos": False}
    for name in ("weather", "now"):
        answer = server.answer(PATH, body | {"tool_choice": allowed("required", name)})
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == name
    short = {"max_completion_tokens": 1, "tools": TOOLS}
    counts = {
        server.answer(PATH, BODY | short | {"tool_choice": choice})["usage"]["prompt_tokens"]
        for choice in ("auto", allowed("auto", "now"), allowed("required", "now"))
    }
    assert len(counts) == 1
    asked = {"input": "hi", "max_output_tokens": 90, "parallel_tool_calls": False}
    asked["tools"] = [{"type": "function", "name": "now"}, {"type": "function", "name": "later"}]
    asked["tool_choice"] = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "later"}],
    }
    response = server.answer("/v1/responses", asked)
    assert response["output"][0]["name"] == "later" and response["tool_choice"] == asked["tool_choice"]


def test_tools_are_in_the_prompt_unless_none_may_be_called(with_tools):
    server = with_tools(tool_parser="hermes")
    tokens = [
        server.answer(PATH, BODY | options)["usage"]["prompt_tokens"]
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "auto"})
    ]
    assert tokens[0] == tokens[1] < tokens[2]


def test_tools_that_cannot_be_are_refused_by_name(with_tools):
    server = with_tools(tool_parser="hermes")
    for body, param in (
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("never", "now")}, "tool_choice.mode"),
        (
            {"tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "a b"}}]},
            "tools.1.function.name",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": BAD}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ):
        assert server.refusal(PATH, BODY | body)["param"] == param


def test_a_shape_may_come_behind_a_thought(serve, tiny_llm):
    server = serve(reasoning_parser="think")
    schema = {"name": "a", "schema": {"const": "yes"}}
    body = BODY | {"response_format": {"type": "json_schema", "json_schema": schema}, "max_completion_tokens": 60}
    answers = [server.answer(PATH, body | {"seed": seed, "ignore_eos": False}) for seed in range(4)]
    messages = [answer["choices"][0]["message"] for answer in answers]
    ended = [m for a, m in zip(answers, messages, strict=True) if a["choices"][0]["finish_reason"] == "stop"]
    assert ended and all(message["content"] == '"yes"' for message in ended)


def test_shapes_behind_a_thought_are_refused_by_name(serve):
    server = serve(reasoning_parser="think")
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}
    error = server.refusal(PATH, BODY | {"response_format": bad})
    assert error["param"] == "response_format.json_schema.schema" and "objekt" in error["message"]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}]
    body = BODY | {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    for param, shape in (
        ("structured_outputs.choice", {"choice": ["a"] * 10_001}),
        ("structured_outputs", {"grammar": 'root ::= "a"'}),
    ):
        assert server.refusal(PATH, body | {"structured_outputs": shape})["param"] == param
    for asked in ({"structured_outputs": {"regex": "a"}, "response_format": bad}, {"structured_outputs": {}}):
        for thinks in (body, BODY):  # a prompt that begins a thought makes no difference
            assert server.refusal(PATH, thinks | asked)["code"] == "invalid_value"


def test_thoughts_come_beside_the_answer(serve):
    server = serve(reasoning_parser="think")
    body = BODY | {"structured_outputs": {"choice": ["<think>hm</think>yes"]}, "ignore_eos": False}
    body["max_completion_tokens"] = 60
    message = server.answer(PATH, body)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    chunks = server.chunks(PATH, body)
    assert "".join(c["choices"][0]["delta"].get("reasoning_content", "") for c in chunks) == "hm"
    assert said(chunks) == "yes"
    assert "reasoning_content" not in server.answer(PATH, body | {"include_reasoning": False})["choices"][0]["message"]

"""Every field of a request, by OpenAI's own types and by the server's, has an effect or is refused by its name."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from openai_fields import fields_of, keys_in, samples
from read_fields import NOWHERE_TOLD, Reads

from jpaged import AsyncLLM
from jpaged.server.app import create_app
from jpaged.server.openai.bodies.chat import ChatRequest
from jpaged.server.openai.bodies.prompts import CompletionRequest
from jpaged.server.openai.bodies.responses import ResponsesRequest
from jpaged.server.settings import ServerSettings

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {"type": "boolean"}
TOOL = {"name": "f", "description": "does it", "parameters": {"type": "object", "properties": {}}, "strict": True}
TOOLS = [{"type": "function", "function": TOOL}]
FLAT_TOOLS = [{"type": "function", **TOOL}]
BASE = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    TEXT: {"prompt": "ab", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
}
SAMPLED = {
    "model": "tiny",
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "max_tokens": 2,
    "n": 2,
    "seed": 1,
    "stop": ["zz"],
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "allowed_token_ids": [5, 6, 7],
    "bad_words": ["zz"],
    "prompt_logprobs": 1,
    "thinking_token_budget": 1,
    "priority": 1,
    "cache_salt": "s",
    "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    "use_beam_search": True,
    "length_penalty": 1.5,
    "early_stopping": True,
    "return_token_ids": True,
}
"""A value of each field that the bodies of chats and completions share."""
PART, THOUGHT = {"type": "text", "text": "hi"}, {"type": "summary_text", "text": "hm"}
VALUES = {
    CHAT: SAMPLED
    | {
        "messages": [
            {"role": "system", "content": "be kind", "name": "s"},
            {"role": "user", "content": [PART]},
            {
                "role": "assistant",
                "content": "so",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "logprobs": True,
        "top_logprobs": 1,
        "max_completion_tokens": 2,
        "modalities": ["text"],
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "safety_identifier": "a",
        "service_tier": "auto",
        "verbosity": "low",
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"a": 1},
        "include_reasoning": False,
    },
    TEXT: SAMPLED | {"prompt": ["ab", [5, 6]], "best_of": 2, "echo": True, "logprobs": 1, "add_special_tokens": False},
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "status": "completed", "summary": [THOUGHT]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "instructions": "be kind",
        "max_output_tokens": 2,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "background": False,
        "store": True,
        "previous_response_id": "resp_a",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "truncation": "auto",
        "stream_options": {"include_obfuscation": True},
        "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
        "reasoning": {"effort": "low"},
        "tools": FLAT_TOOLS,
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "safety_identifier": "a",
    }
    | {name: SAMPLED[name] for name in ("model", "temperature", "top_p", "stream", "top_k", "min_p", "seed", "stop")}
    | {name: SAMPLED[name] for name in ("repetition_penalty", "min_tokens", "ignore_eos", "priority", "cache_salt")}
    | {"thinking_token_budget": 1},
}
BEAMS, TWO = {"use_beam_search": True}, {"n": 2}
CALLS = {"tools": TOOLS, "tool_choice": "auto"}
MODES = {
    CHAT: [{}, {"stream": True}, BEAMS, TWO, CALLS, {"logprobs": True}, {"response_format": {"type": "text"}}],
    TEXT: [{}, {"stream": True}, BEAMS, TWO, {"logprobs": 0}, {"echo": True}],
    RESPONSES: [{}, {"stream": True}, {"tools": FLAT_TOOLS}, {"text": {"format": {"type": "text"}}}],
}
"""What changes how a request is answered; every field is sent beside each."""
NEVER_HONOURED = {CHAT: {"priority"}, TEXT: {"priority"}, RESPONSES: {"priority", "previous_response_id"}}
"""What needs a server with --scheduling-policy priority, or a response that was stored."""
MODELS = {CHAT: ChatRequest, TEXT: CompletionRequest, RESPONSES: ResponsesRequest}
TYPES = {
    CHAT: (chats.CompletionCreateParamsNonStreaming, chats.CompletionCreateParamsStreaming),
    TEXT: (completions.CompletionCreateParamsNonStreaming, completions.CompletionCreateParamsStreaming),
    RESPONSES: (responses.ResponseCreateParamsNonStreaming, responses.ResponseCreateParamsStreaming),
}


@pytest.fixture
def reads(monkeypatch, tiny_llm):
    begun = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ reasoning_effort or '' }}"
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", begun + tiny_llm.tokenizer.chat_template)
    return Reads(monkeypatch)


def ask_all(llm, path, bodies, *, parsers=True):
    """The status and the text of each body's answer; body i is of the user ``case-i``."""
    parsed = {"tool_parser": "hermes", "reasoning_parser": "think"} if parsers else {}

    async def main():
        async with AsyncLLM.from_llm(llm, max_waiting_requests=1000) as engine:
            app = create_app(engine, ServerSettings(model="tiny", max_waiting=1000, **parsed))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                each = [ask(client, i, body) for i, body in enumerate(bodies)]
                answers = []
                for i in range(0, len(each), 64):
                    answers += await asyncio.gather(*each[i : i + 64])
                return answers

    async def ask(client, i, body):
        answer = await client.post(path, json=body | {"user": f"case-{i}"})
        return answer.status_code, answer.text

    return asyncio.run(asyncio.wait_for(main(), 300))


def outcome(reads, i, status, text, field, value, beside=()):
    """Whether a request was answered. Fails where a field was dropped, or refused without its name."""
    if status == 200:
        assert reads.dropped(f"case-{i}") == set(), (field, value, beside)
        return True
    assert status in (400, 404), (status, text)
    error = json.loads(text)["error"]
    begun = (error["param"] or "").split(".")
    names = {field, *keys_in(value), *beside}
    assert names & {begun[0], begun[-1]} or any(name in error["message"] for name in names), (field, value, error)
    return False


@pytest.mark.parametrize("path", BASE)
def test_every_field_of_openais_types_is_honoured_or_refused_by_name(tiny_llm, reads, path):
    hints = {name: hint for kind in TYPES[path] for name, hint in fields_of(kind).items()}
    cases = [("model", "other")]
    for name in hints.keys() - {"model", "user"}:
        cases += [(name, value) for value in samples(hints[name])]
    answers = ask_all(tiny_llm, path, [BASE[path] | {name: value} for name, value in cases])
    honoured = [
        case[0]
        for i, (case, (status, text)) in enumerate(zip(cases, answers, strict=True))
        if outcome(reads, i, status, text, *case)
    ]
    assert len(set(honoured)) >= 8 and len(cases) > 20, (len(cases), sorted(set(honoured)))


@pytest.mark.parametrize("path", BASE)
def test_every_field_of_the_server_has_an_effect_beside_every_mode_or_is_refused_by_name(tiny_llm, reads, path):
    assert VALUES[path].keys() | {"user"} == MODELS[path].model_fields.keys()
    cases = [(name, value, mode) for mode in MODES[path] for name, value in VALUES[path].items()]
    if path != RESPONSES:  # fields that need another one
        cases += [(name, SAMPLED[name], BEAMS) for name in ("length_penalty", "early_stopping")]
        cases += [("stream_options", SAMPLED["stream_options"], {"stream": True})]
    else:
        cases += [("top_logprobs", 1, {"include": VALUES[path]["include"]})]
    honoured = set()
    for parsers in (True, False) if path == RESPONSES else (True,):  # logprobs need a text that is not read for parts
        answers = ask_all(tiny_llm, path, [BASE[path] | mode | {n: v} for n, v, mode in cases], parsers=parsers)
        honoured |= {
            name
            for i, ((name, value, mode), (status, text)) in enumerate(zip(cases, answers, strict=True))
            if outcome(reads, i, status, text, name, value, {*mode, "use_beam_search"})
        }
        reads.forget()
    assert honoured == VALUES[path].keys() - NEVER_HONOURED[path]


def test_what_is_dropped_would_be_found(reads):
    body = ChatRequest.model_validate(BASE[CHAT] | {"user": "a", "seed": 1, "stream_options": {"include_usage": True}})
    assert sorted(reads.unread(body)) == [
        "max_tokens",
        "messages",
        "messages.0.content",
        "messages.0.role",
        "seed",
        "stream_options",
        "stream_options.0.include_usage",
        "user",
    ]
    assert body.seed == 1 and body.messages[0].model_dump(exclude={"role"})
    left = ["max_tokens", "messages.0.role", "stream_options", "stream_options.0.include_usage", "user"]
    assert sorted(reads.unread(body)) == left
    known = {(kind.__name__, name) for kind in bodies() for name in kind.model_fields}
    assert known >= NOWHERE_TOLD.keys()


def bodies():
    from jpaged.server.bodies import Body

    def below(kind):
        return {kind}.union(*(below(inner) for inner in kind.__subclasses__()))

    return below(Body)

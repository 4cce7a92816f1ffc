"""Whatever a body holds, the server answers it or says what is wrong: never with a 5xx, and with no block left over."""

import asyncio
import json
import math
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from thorough import examples

from jpaged import AsyncLLM
from jpaged.server.app import create_app
from jpaged.server.batch import BatchRequest, _ask
from jpaged.server.bodies import Body
from jpaged.server.openai.bodies.chat import ChatRequest
from jpaged.server.openai.bodies.prompts import CompletionRequest, DetokenizeRequest, TokenizeRequest
from jpaged.server.openai.bodies.responses import ResponsesRequest
from jpaged.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {  # path: model and a body that is answered
    "/v1/completions": (CompletionRequest, {"prompt": "abc", "max_tokens": 3}),
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES, "max_tokens": 3}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 3}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
APT = {  # values that a field may well have, and some that come close
    "structured_outputs": [{"regex": "(a|b)*"}, {"regex": "("}, {"json": {"$ref": "#"}}, {"grammar": "start: x"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}],
    "tools": [[{"type": "function", "function": FUNCTION}], [{"type": "function", **FUNCTION}]],
    "tool_choice": ["required", "auto", {"type": "function", "function": {"name": "f"}}],
    "messages": [[{"role": "tool", "content": "a", "tool_call_id": "x"}], [{"role": "user"}]],
    "input": [MESSAGES, [], [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]],
    "prompt": [[5, 6], ["a", [6]], [[]], [""], []],
    "logit_bias": [{"5": 1.0}, {"-5": 1.0}],
    "allowed_token_ids": [[5], []],
}
TEXTS = st.sampled_from(["", "a", "tiny", "auto", "text", "\ud800", "\x00", "</think>", "{", "a" * 500, "user"])
NUMBERS = st.sampled_from([0, 1, -1, 2, 20, 21, 128, 10**6, 2**63, 10**30, 0.0, 0.5, 1e308, float("nan"), float("inf")])
ODD = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def bodies(draw):
    path = draw(st.sampled_from(sorted(BODIES)))
    model, body = BODIES[path]
    for name in draw(st.lists(st.sampled_from([*sorted(model.model_fields), "nonsense"]), max_size=4)):
        body = body | {name: draw(st.sampled_from(APT[name]) | ODD if name in APT else ODD)}
    return path, body


HALF = "\ud800"
"""Half of a surrogate pair, which JSON can write and UTF-8 cannot."""


def test_text_that_is_no_unicode_is_answered_or_refused_in_any_field(tiny_llm):
    async def main():
        async with AsyncLLM.from_llm(tiny_llm) as engine:
            app = create_app(engine, ServerSettings(model="tiny", tool_parser="hermes", reasoning_parser="think"))
            for path, (model, body) in BODIES.items():
                for field in [*model.model_fields, HALF]:
                    for odd in (HALF, [HALF], {HALF: HALF}, [{"role": "user", "content": HALF, "name": HALF}]):
                        reply = await _ask(app, BatchRequest("a", path, body | {field: odd}))
                        assert reply.status < 500, (path, field, odd)
                        if reply.status != 200:
                            assert reply.body["error"]["message"].isprintable()

    asyncio.run(main())
    assert tiny_llm.control.engine.memory.num_used_blocks == 0


@pytest.mark.parametrize("family", ["hermes", "llama3"])
def test_no_body_is_the_servers_fault(tiny_llm, family):
    async def main(ask):
        async with AsyncLLM.from_llm(tiny_llm) as engine:
            app = create_app(engine, ServerSettings(model="tiny", tool_parser=family, reasoning_parser="think"))
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(ask, lambda request: asyncio.run_coroutine_threadsafe(_ask(app, request), loop))

    def ask(send):
        @settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
        @given(bodies())
        def try_all(case):
            path, body = case
            request = BatchRequest("a", path, body | {"stream": False} if "/v1/" in path else body)
            reply = send(request).result(30)
            assert reply.status < 500, reply
            assert reply.status == 200 or reply.body["error"]["message"], json.dumps(body)

        try_all()

    asyncio.run(main(ask))
    assert tiny_llm.control.engine.memory.num_used_blocks == 0


def kinds_of_bodies(kind=Body):
    for each in kind.__subclasses__():
        yield each
        yield from kinds_of_bodies(each)


def errors_of(kind, name, value):
    try:
        kind(**{name: value})
    except ValidationError as error:
        return [each for each in error.errors() if each["loc"][:1] == (name,)]
    return []


def test_every_integer_of_a_body_may_be_a_whole_float_and_nothing_else():
    fields = 0
    for kind in set(kinds_of_bodies()):
        for name, field in kind.model_fields.items():
            if "int" not in re.findall(r"\w+", str(field.annotation)) and field.annotation is not int:
                continue
            fields += 1
            lists = "list" in str(field.annotation)
            for value in ([1.0], [2, 3.0]) if lists else (1.0, 2.0):
                assert not errors_of(kind, name, value), (kind, name)
            for value in (5.5, math.inf, math.nan, "5", True):
                found = errors_of(kind, name, [value] if lists and not (name == "prompt" or name == "input") else value)
                said = {"prompt", "input"} & {name} and isinstance(value, str)
                assert said or any("integer" in each["msg"] or "string" in each["msg"] for each in found), (
                    kind,
                    name,
                    value,
                )
    assert fields >= 30
    asked = CompletionRequest(prompt=[1.0, 2], max_tokens=5.0, stop_token_ids=[7.0])
    assert str([asked.prompt, asked.max_tokens, asked.stop_token_ids]) == "[[1, 2], 5, [7]]"
    assert str(CompletionRequest(prompt=[[1.0], "a"]).prompt) == "[[1], 'a']"

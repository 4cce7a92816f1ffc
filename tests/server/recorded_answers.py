"""The answers of a scripted model on the generating paths, as texts.

``PYTHONPATH=tests/server:tests/engine:tests/models python tests/server/recorded_answers.py --write`` records them.
Regenerate the record only where an answer is meant to change, and read its difference.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from unittest import mock

import httpx
from scripted_model import Script, ScriptedModel

from jpaged import EngineBusy, EngineStopped, SamplingParams
from jpaged.server.access import Key
from jpaged.server.app import create_app
from jpaged.server.openai.endpoints.common import FINGERPRINT
from jpaged.server.settings import ServerSettings

RECORD = Path(__file__).with_suffix(".json")
CHAT, COMPLETE, RESPOND = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"


def cut(text: str, size: int) -> tuple[str, ...]:
    return tuple(text[i : i + size] for i in range(0, len(text), size))


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE = call("f", '{"city": "Paris", "n": [1, 2]}')
TWO = call("f", '{"city": "Ö\\"\\\\"}') + "\n" + call("g", "{}")
CUSTOM = call("shell", '{"input": "ls\\n\\u00e9 \\"x\\""}')
SPACED = call("fs.read", '{"city": "a"}')
SCRIPTS = {
    "text": Script(("Hel", "lo", "", " wörld", "\u2028", "!")),
    "empty": Script(("",)),
    "stopped": Script(("so ", "far"), "stop", "END"),
    "stopid": Script(("so ", "far"), "stop", 42),
    "long": Script(("too ", "long"), "length"),
    "aborted": Script(("half ", "a \ufffd"), "abort"),
    "thought": Script(cut("<think>\nwhy not\n</think>\n\nbecause", 3)),
    "open": Script(cut("<think>no end", 4), "length"),
    "nothink": Script(cut("no thought", 4)),
    "begun": Script(cut("rest of it</think>\nsaid", 4)),
    "one": Script(cut(ONE, 5)),
    "two": Script(cut("I call.\n" + TWO, 7)),
    "cutcall": Script(cut(ONE[:-30], 6), "length"),
    "stopcall": Script(cut(ONE[:-30], 6), "stop", "1"),
    "cuthead": Script(cut(ONE[:25], 6), "length"),
    "custom": Script(cut(CUSTOM, 3)),
    "spaced": Script(cut(SPACED, 9)),
    "nocall": Script(cut("<tool_call> is a mark", 4)),
    "all": Script(cut("<think>I will</think>\n\nSure:\n" + TWO, 6)),
    "json": Script(cut('{"a": 1}', 2)),
    "busy": Script(("a", "b"), fails=EngineBusy("the engine has 9 requests, the limit is 9")),
    "dead": Script(("a", "b"), fails=EngineStopped("gone")),
    "broken": Script(("a", "b"), fails=RuntimeError("secret")),
    "slow": Script(("a", "b"), fails=TimeoutError()),
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
F = {"type": "function", "function": {"name": "f", "description": "about", "parameters": CITY}}
G = {"type": "function", "function": {"name": "g"}}
SHELL = {"type": "custom", "custom": {"name": "shell", "description": "runs", "format": {"type": "text"}}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOLS = [F, G, SHELL]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
OF_RESPONSES = [
    {"type": "function", "name": "f", "description": "about", "parameters": CITY},
    {"type": "function", "name": "g", "strict": True},
    {"type": "custom", "name": "shell", "description": "runs", "format": {"type": "text"}},
    {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read", "parameters": CITY}]},
]
HISTORY = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "look"}, PICTURE]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}},
            {"id": "c2", "type": "custom", "custom": {"name": "shell", "input": "ls"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "warm"},
    {"role": "tool", "tool_call_id": "c2", "content": "a b"},
    {"role": "user", "content": "#text#"},
]
ITEMS = [
    {"role": "developer", "content": "be brief"},
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "look"},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        ],
    },
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"city": "Rome"}'},
    {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": "ls"},
    {"type": "function_call", "call_id": "c3", "namespace": "fs", "name": "read"},
    {"type": "function_call_output", "call_id": "c1", "output": "warm"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a b"}]},
    {"type": "function_call_output", "call_id": "c3", "output": "c"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]},
    {"role": "user", "content": "#text#"},
]
WITH_USAGE = {"stream_options": {"include_usage": True}}
EVERY_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def ask(script: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": f"#{script}#"}]} | more


def respond(script: str, **more) -> dict:
    return {"input": f"#{script}#"} | more


def cases() -> dict[str, tuple[str, dict]]:
    """Return the requests by name; each is also streamed, unless it says whether it is."""
    tool_scripts = ("one", "two", "cutcall", "stopcall", "cuthead", "custom", "nocall", "all", "text")
    found: dict[str, tuple[str, dict]] = {}
    plain = [name for name in SCRIPTS if name not in ("one", "two", "custom", "spaced", "cuthead", "stopcall")]
    found |= {f"chat {name}": (CHAT, ask(name)) for name in plain}
    found |= {f"response {name}": (RESPOND, respond(name)) for name in plain}
    found |= {f"completion {name}": (COMPLETE, {"prompt": f"#{name}#"}) for name in ("text", "stopped", "long", "busy")}
    found |= {f"chat tools {name}": (CHAT, ask(name, tools=TOOLS)) for name in tool_scripts}
    found |= {
        f"response tools {name}": (RESPOND, respond(name, tools=OF_RESPONSES)) for name in (*tool_scripts, "spaced")
    }
    asked = {
        "choices": ask("all", n=2, tools=TOOLS) | WITH_USAGE,
        "usage": ask("thought") | WITH_USAGE,
        "continuous usage": ask("thought") | EVERY_USAGE,
        "logprobs": ask("text", logprobs=True, top_logprobs=2),
        "chosen logprobs": ask("thought", logprobs=True),
        "token ids": ask("two", return_token_ids=True, tools=TOOLS),
        "silent": ask("thought", include_reasoning=False),
        "begun": ask("begun"),
        "history": {"messages": HISTORY, "tools": TOOLS},
        "shape": ask("json", response_format={"type": "json_object"}),
        "schema": ask("json", response_format=SCHEMA),
        "schema and tools": ask("json", response_format=SCHEMA, tools=TOOLS),
        "structure": ask("json", structured_outputs={"regex": "a+"}),
        "named": ask("one", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}}),
        "custom named": ask("custom", tools=TOOLS, tool_choice={"type": "custom", "custom": {"name": "shell"}}),
        "required": ask("one", tools=TOOLS, tool_choice="required", parallel_tool_calls=False),
        "allowed": ask(
            "one",
            tools=TOOLS,
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "name": "f"}]},
            },
        ),
        "none": ask("text", tools=TOOLS, tool_choice="none"),
        "effort": ask("text", reasoning_effort="high", verbosity="low", metadata={"a": "b"}, user="me"),
        "lark": ask("text", tools=[{"type": "custom", "custom": {"name": "shell", "format": LARK}}]),
        "continued": {
            "messages": [*HISTORY, {"role": "assistant", "content": "<think>ab"}],
            "continue_final_message": True,
        },
        "sampled": ask(
            "text",
            temperature=0.5,
            top_p=0,
            seed=-3,
            stop=["x"],
            logit_bias={"5": 1},
            max_tokens=9,
            presence_penalty=0.5,
            cache_salt="s",
            priority=3,
        ),
    }
    found |= {f"chat {name}": (CHAT, body) for name, body in asked.items()}
    found |= {
        f"chat whole {name}": (CHAT, body | {"stream": False})
        for name, body in {
            "prompt logprobs": ask("text", prompt_logprobs=1),
            "beams": ask("text", use_beam_search=True, n=2, max_tokens=6),
        }.items()
    }
    wrong = {
        "tools without": ask("text", tool_choice="required"),
        "tools twice": ask("text", tools=[F, F]),
        "tool name": ask("text", tools=[{"type": "function", "function": {"name": "a b"}}]),
        "unknown tool": ask("text", tools=[F], tool_choice={"type": "function", "function": {"name": "x"}}),
        "strict": ask(
            "text",
            tools=[
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "strict": True,
                        "parameters": {"type": "object", "properties": {"a": {"not": {}}}},
                    },
                }
            ],
        ),
        "no object": ask(
            "text", tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
        ),
        "hidden": ask("text", tools=[F], skip_special_tokens=True),
        "two shapes": ask("text", response_format=SCHEMA, structured_outputs={"regex": "a"}),
        "no schema": ask("text", response_format={"type": "json_schema"}),
        "bad structure": ask("text", structured_outputs={"regex": "a", "choice": ["b"]}),
        "bad structure and tools": ask("text", structured_outputs={"regex": "a", "choice": ["b"]}, tools=[F]),
        "limits": ask("text", max_tokens=3, max_completion_tokens=4),
        "no tokens": ask("text", max_completion_tokens=0),
        "refused by the engine": ask("text", max_completion_tokens=399),
        "temperature": ask("text", temperature=-1),
        "bias": ask("text", logit_bias={"a": 1}),
        "long": {"messages": [{"role": "user", "content": "#text# " * 500}]},
        "model": ask("text", model="other"),
        "unknown": ask("text", temprature=1),
        "role": {"messages": [{"role": "user", "content": "a", "tool_call_id": "c"}]},
        "audio": {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "no messages": {"messages": []},
        "both generation": ask("text", continue_final_message=True, add_generation_prompt=True),
        "lonely logprobs": ask("text", top_logprobs=2),
        "beam tools": ask("text", use_beam_search=True, tools=[F]),
        "beam top_p": ask("text", use_beam_search=True, top_p=0.5),
        "body": [1],
    }
    found |= {f"chat wrong {name}": (CHAT, body) for name, body in wrong.items()}
    responses = {
        "history": {"input": ITEMS, "instructions": "obey", "tools": OF_RESPONSES},
        "begun": respond("begun"),
        "shape": respond("json", text={"format": {"type": "json_object"}, "verbosity": "low"}),
        "schema": respond("json", text={"format": {"type": "json_schema", "name": "x", "schema": CITY}}),
        "schema and tools": respond(
            "json", text={"format": {"type": "json_schema", "schema": CITY}}, tools=OF_RESPONSES
        ),
        "named": respond("one", tools=OF_RESPONSES, tool_choice={"type": "function", "name": "f"}),
        "allowed": respond(
            "one",
            tools=OF_RESPONSES,
            tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        ),
        "required": respond("one", tools=OF_RESPONSES, tool_choice="required", parallel_tool_calls=False),
        "none": respond("text", tools=OF_RESPONSES, tool_choice="none"),
        "effort": respond("text", reasoning={"effort": "none"}, user="me", metadata={"a": "b"}, store=False),
        "lark": respond("text", tools=[{"type": "custom", "name": "shell", "format": LARK["grammar"]}]),
        "sampled": respond(
            "text",
            temperature=0.5,
            top_p=0.0,
            top_k=4,
            min_p=0.1,
            seed=3,
            stop="x",
            min_tokens=1,
            repetition_penalty=1.1,
            ignore_eos=True,
            cache_salt="s",
            priority=3,
            max_output_tokens=9,
        ),
        "dropped": respond(
            "text",
            truncation="auto",
            input=[{"role": "user", "content": "a " * 250}, {"role": "user", "content": "#text# " + "b " * 100}],
        ),
    }
    found |= {f"response {name}": (RESPOND, body) for name, body in responses.items()}
    wrong = {
        "tools without": respond("text", tool_choice="required"),
        "tools twice": respond("text", tools=[OF_RESPONSES[0]] * 2),
        "tool name": respond("text", tools=[{"type": "web_search"}, {"type": "function", "name": "a b"}]),
        "inner tool name": respond(
            "text",
            tools=[
                {
                    "type": "namespace",
                    "name": "fs",
                    "tools": [{"type": "function", "name": "ok"}, {"type": "custom", "name": "a b"}],
                }
            ],
        ),
        "unknown tool": respond("text", tools=OF_RESPONSES, tool_choice={"type": "function", "name": "x"}),
        "strict": respond(
            "text",
            tools=[
                {
                    "type": "function",
                    "name": "f",
                    "strict": True,
                    "parameters": {"type": "object", "properties": {"a": {"not": {}}}},
                }
            ],
        ),
        "no schema": respond("text", text={"format": {"type": "json_schema", "name": "x"}}),
        "bad schema": respond("text", text={"format": {"type": "json_schema", "schema": {"type": "nope"}}}),
        "no tokens": respond("text", max_output_tokens=0),
        "refused by the engine": respond("text", max_output_tokens=399),
        "temperature": respond("text", temperature=-1),
        "top_k": respond("text", top_k=-5),
        "stop": respond("text", stop=[""]),
        "long": {"input": "#text# " * 500},
        "empty": {"input": []},
        "item": {"input": [{"type": "function_call", "call_id": "c"}]},
        "image of the assistant": {
            "input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:"}]}]
        },
        "background": respond("text", background=True, store=False),
        "lonely logprobs": respond("text", top_logprobs=2),
        "split logprobs": respond("text", include=["message.output_text.logprobs"]),
        "previous": respond("text", previous_response_id="resp_1"),
        "model": respond("text", model="other"),
        "unknown": respond("text", max_tokens=1),
    }
    found |= {f"response wrong {name}": (RESPOND, body) for name, body in wrong.items()}
    return found | of_messages(plain, tool_scripts)


def tell(script: str, **more) -> dict:
    return {"max_tokens": 50, "messages": [{"role": "user", "content": f"#{script}#"}]} | more


def of_messages(plain, tool_scripts) -> dict[str, tuple[str, dict]]:
    """Return the requests for Anthropic's messages."""
    found = {f"message {name}": tell(name) for name in plain}
    tools = [{"name": "f", "description": "about", "input_schema": CITY}, {"name": "g", "input_schema": {}}]
    found |= {f"message tools {name}": tell(name, tools=tools) for name in tool_scripts if name != "custom"}
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [{"type": "text", "text": "no"}]}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Rome"}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "#text#"}]},
    ]
    found |= {
        f"message {name}": body
        for name, body in {
            "history": tell("text", messages=history, system=[{"type": "text", "text": "obey"}], tools=tools),
            "begun": tell("begun"),
            "any": tell("one", tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True}),
            "named": tell("one", tools=tools, tool_choice={"type": "tool", "name": "f"}),
            "none": tell("text", tools=tools, tool_choice={"type": "none"}),
            "sampled": tell(
                "text", temperature=0.5, top_p=0.5, top_k=4, stop_sequences=["x"], metadata={"user_id": "me"}
            ),
            "wrong no tokens": tell("text", max_tokens=0),
            "wrong role": tell("text", messages=[{"role": "x", "content": "a"}]),
            "wrong long": tell("text", messages=[{"role": "user", "content": "#text# " * 500}]),
            "wrong tool choice": tell("text", tools=tools, tool_choice={"type": "tool", "name": "x"}),
            "wrong lonely choice": tell("text", tool_choice={"type": "any"}),
            "wrong result": tell("text", messages=[{"role": "user", "content": [{"type": "tool_result"}]}]),
            "wrong model": tell("text", model="other"),
            "wrong unknown": tell("text", nope=1),
        }.items()
    }
    return {name: (MESSAGES, {"model": "tiny"} | body) for name, body in found.items()}


PLAIN_CASES = {
    "plain response logprobs": (RESPOND, respond("text", include=["message.output_text.logprobs"], top_logprobs=2)),
    "plain response tools": (RESPOND, respond("text", tools=OF_RESPONSES)),
    "plain chat tools": (CHAT, ask("text", tools=TOOLS)),
    "plain chat": (CHAT, ask("thought") | WITH_USAGE),
    "plain response": (RESPOND, respond("thought")),
    "plain chat schema": (CHAT, ask("json", response_format=SCHEMA)),
    "plain chat no schema": (CHAT, ask("json", response_format={"type": "json_schema"})),
    "plain chat bad structure": (CHAT, ask("json", structured_outputs={"regex": "a", "choice": ["b"]})),
    "plain chat two shapes": (CHAT, ask("json", structured_outputs={"regex": "a"}, response_format=SCHEMA)),
    "plain response schema": (RESPOND, respond("json", text={"format": {"type": "json_schema", "schema": CITY}})),
}
"""Requests to a server that reads neither thoughts nor tools."""


async def answers_of(settings: ServerSettings, asked, headers: dict[str, str] | None = None) -> dict[str, dict]:
    """Return the status, the body and what the engine was given, by the request's name."""
    model = ScriptedModel(SCRIPTS)
    app = create_app(model, settings)
    found = {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for name, (path, body) in asked.items():
            both = isinstance(body, dict) and "stream" not in body
            for kind, more in {"": {}, "streamed ": {"stream": True}}.items() if both else [("", {})]:
                sent = body | more if more else body
                if not more and isinstance(body, dict):
                    sent = {key: value for key, value in body.items() if key != "stream_options"}
                model.prompts.clear(), model.params.clear()
                with fixed():
                    answer = await client.post(path, json=sent, headers=headers or {"X-Request-Id": "req-1"})
                text = answer.text.replace(FINGERPRINT, "jpaged-VERSION")
                given = [_changed(one) for one in model.params]
                found[kind + name] = {
                    "status": answer.status_code,
                    "type": answer.headers.get("content-type"),
                    "body": text.split("\n\n") if "event-stream" in answer.headers.get("content-type", "") else text,
                    "prompts": json.loads(json.dumps(model.prompts)),
                    "params": given,
                }
    return found


def _changed(params) -> dict[str, str]:
    """Return the parameters that differ from those of a request without fields."""
    plain = SamplingParams(temperature=0.0)
    return {
        each.name: repr(value)
        for each in fields(params)
        if (value := getattr(params, each.name)) != getattr(plain, each.name, None)
    }


@contextmanager
def fixed():
    """Hold ids and the time."""
    one = uuid.UUID(int=0x1234)
    with mock.patch.object(uuid, "uuid4", lambda: one), mock.patch.object(time, "time", lambda: 1_700_000_000.5):
        yield


async def all_answers() -> dict[str, dict]:
    """Return every answer by its name."""
    split = ServerSettings(model="tiny", tool_parser="hermes", reasoning_parser="think")
    found = await answers_of(split, cases())
    found |= await answers_of(ServerSettings(model="tiny"), PLAIN_CASES)
    keyed = ServerSettings(model="tiny", keys=(Key.of("one", "alice"),))
    refused = {"without a key": (CHAT, ask("text", stream=False)), "no path": ("/v1/nothing", {"stream": False})}
    found |= await answers_of(keyed, refused)
    bearer = {"Authorization": "Bearer one", "X-Request-Id": "req-2"}
    return found | await answers_of(keyed, {"with a key": (CHAT, ask("text"))}, bearer)


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/server/recorded_answers.py --write")
    found = asyncio.run(all_answers())
    RECORD.write_text(json.dumps(found, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()

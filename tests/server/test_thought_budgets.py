"""Budgets of thoughts in every protocol's words: the closing mark comes after them, and usage counts them."""

import asyncio

import httpx
import pytest
from recorded_answers import SCRIPTS
from scripted_model import ScriptedModel

from jpaged import ReasoningConfig
from jpaged.server.app import create_app
from jpaged.server.settings import ServerSettings
from jpaged.text.served_formats import served_formats

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TURN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}]
OPENED = {"messages": TURN, "add_generation_prompt": False, "continue_final_message": True, "ignore_eos": True}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def streamed(server, path, body):
    """Return the usage and the thought that a stream of a chat has."""
    chunks = server.chunks(path, body | {"stream_options": {"include_usage": True}})
    thought = [one["delta"].get("reasoning_content", "") for chunk in chunks for one in chunk["choices"]]
    return chunks[-1]["usage"], "".join(thought)


def test_a_chat_stops_thinking_after_its_budget_and_counts_it(serve, tiny_llm, monkeypatch):
    named = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", named + tiny_llm.tokenizer.chat_template)
    server = serve(reasoning_parser="think", tool_parser="hermes")
    size = len(tiny_llm.tokenizer.encode("</think>", add_special_tokens=False))
    for budget in (0, 6):
        body = {"model": "tiny", "max_tokens": 30, "seed": 4, "thinking_token_budget": budget} | OPENED
        answer = server.answer(CHAT, body)
        usage, thought = streamed(server, CHAT, body)
        assert usage["completion_tokens_details"] == answer["usage"]["completion_tokens_details"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == budget + size
        assert answer["choices"][0]["message"].get("reasoning_content", "") == thought
        assert len(tiny_llm.tokenizer.encode(thought, add_special_tokens=False)) <= budget
    tools = {"tools": TOOLS, "tool_choice": "required", "ignore_eos": False, "max_tokens": 80}
    answer = server.answer(CHAT, body | tools)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 6 + size + 3
    shape = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 5}}}}
    assert server.answer(CHAT, body | shape | {"ignore_eos": False})["choices"][0]["message"]["content"] == "5"


def test_the_servers_text_ends_a_thought(serve, tiny_llm, monkeypatch):
    monkeypatch.setattr(tiny_llm.input_processor, "reasoning", ReasoningConfig(reasoning_end_str="Now.</think>"))
    server = serve(reasoning_parser="think")
    body = {"model": "tiny", "max_tokens": 30, "seed": 4, "thinking_token_budget": 6} | OPENED
    answer = server.answer(CHAT, body)
    thought = answer["choices"][0]["message"]["reasoning_content"]
    _, streamed_thought = streamed(server, CHAT, body)
    assert thought.endswith("Now.") and streamed_thought.strip() == thought
    ids = tiny_llm.tokenizer.encode
    size = len(ids("Now.", add_special_tokens=False)) + len(ids("</think>", add_special_tokens=False))
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6 + size
    asked = {"model": "tiny", "seed": 4, "ignore_eos": True, "thinking_token_budget": 3, "max_tokens": 30}
    text = server.answer(TEXT, asked | {"prompt": "a<think>"})["choices"][0]["text"]
    assert "Now.</think>" in text


def started(llm, thoughts, tools, **config):
    """Return the formats of a server that a command starts."""
    found = served_formats(
        llm.tokenizer, ReasoningConfig(**config) if config else None, llm.vocab_size, tools, thoughts
    )
    return found.thoughts, found.tools


@pytest.mark.parametrize(
    ("text", "formats", "said"),
    [
        ("a<tool_call>b", ("think", "hermes"), "'a<tool_call>b' must be text of a thought"),
        ("a</think><think>", ("think", None), "begins a thought after the mark '</think>'"),
        ("now", (None, "hermes"), "needs the form of the model's thoughts, .* --reasoning-parser names one"),
    ],
)
def test_a_text_that_could_end_no_thought_is_refused_before_a_server_starts(tiny_llm, text, formats, said):
    with pytest.raises(ValueError, match=said):
        started(tiny_llm, *formats, reasoning_end_str=text)
    assert started(tiny_llm, *formats) == formats
    assert started(tiny_llm, "think", formats[1], reasoning_end_str="now</think>a") == ("think", formats[1])


def test_a_config_of_thoughts_names_their_format_and_its_mark(tiny_llm):
    assert started(tiny_llm, None, "none", reasoning_parser="think") == ("think", None)
    assert started(tiny_llm, "seed_oss", "none", reasoning_parser="think") == ("seed_oss", None)
    assert started(tiny_llm, "think", "none", reasoning_start_str="<think>\n") == ("think", None)
    with pytest.raises(ValueError, match="reasoning_start_str='<thought>' begins no thought of the format 'think'"):
        started(tiny_llm, "think", "none", reasoning_start_str="<thought>")


def test_completions_and_responses_take_the_budget_too(serve, tiny_llm):
    server = serve(reasoning_parser="think")
    size = len(tiny_llm.tokenizer.encode("</think>", add_special_tokens=False))
    asked = {"model": "tiny", "seed": 4, "ignore_eos": True, "thinking_token_budget": 3}
    both = {"prompt": ["a<think>", "no thought"], "max_tokens": 30, "return_token_ids": True}
    first, second = server.answer(TEXT, asked | both)["choices"]
    closing = tiny_llm.tokenizer.encode("</think>", add_special_tokens=False)
    assert first["token_ids"][3 : 3 + size] == closing and len(second["token_ids"]) == 30
    usage = server.answer(RESPONSES, asked | {"input": "hi", "max_output_tokens": 9})["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


def test_a_budget_without_a_known_form_of_thoughts_is_refused_with_the_reason(serve):
    server = serve()
    bodies = {CHAT: {"messages": TURN[:1]}, TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"}}
    for path, body in bodies.items():
        error = server.refusal(path, {"model": "tiny", "thinking_token_budget": 9} | body)
        assert error["param"] == "thinking_token_budget" and "shows no thoughts" in error["message"]
        error = server.refusal(path, {"model": "tiny", "thinking_token_budget": -2} | body)
        assert error["param"] == "thinking_token_budget" and "-2" in error["message"]
    beams = {"model": "tiny", "thinking_token_budget": 9, "use_beam_search": True, "prompt": "a"}
    assert server.refusal(TEXT, beams)["param"] == "thinking_token_budget"


# ---------------------------------------------------------------------- Anthropic's words


def asked(thinking, **parsers):
    """Return what the engine is given for a message with this `thinking`, and the answer."""
    model = ScriptedModel(SCRIPTS)
    app = create_app(model, ServerSettings(model="tiny", **parsers))
    body = {"model": "tiny", "max_tokens": 90, "messages": [{"role": "user", "content": "#text#"}]}

    async def ask():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(MESSAGES, json=body | {"thinking": thinking})

    return model.params[-1] if (answer := asyncio.run(ask())).status_code == 200 else None, answer.json()


def test_budget_tokens_are_the_engines_budget():
    for budget in (0, 5, 1024):
        params, answer = asked({"type": "enabled", "budget_tokens": budget}, reasoning_parser="think")
        assert (params.thinking_token_budget, params.reasoning_parser, params.tool_parser) == (budget, "think", "none")
        assert "not_honoured" not in answer
    params, _ = asked({"type": "enabled"}, reasoning_parser="think")
    assert params.thinking_token_budget is None


def test_a_model_without_known_thoughts_answers_and_names_the_budget():
    params, answer = asked({"type": "enabled", "budget_tokens": 5})
    assert params.thinking_token_budget is None
    assert "--reasoning-parser" in answer["not_honoured"]["thinking.budget_tokens"]
    _, answer = asked({"type": "enabled", "budget_tokens": 5}, strict_fields=True)
    assert answer["type"] == "error" and "thinking.budget_tokens" in answer["error"]["message"]


@pytest.mark.parametrize("budget", [-1, 1.5, "many", True])
def test_budget_tokens_that_are_none_are_refused_by_their_path(budget):
    _, answer = asked({"type": "enabled", "budget_tokens": budget}, reasoning_parser="think")
    assert answer["type"] == "error" and "thinking.budget_tokens" in answer["error"]["message"]
    _, answer = asked({"type": "disabled", "budget_tokens": 5}, reasoning_parser="think")
    assert answer["type"] == "error" and "'disabled'" in answer["error"]["message"]

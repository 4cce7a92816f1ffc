"""Clients of other projects talk, stream, call tools and get structured answers, with the requests that they make.

The model is small: a loop of an agent may reach its limit of turns, and a call is repeated until the limit of tokens
cuts one off, unless only one may be made. What counts is that every request is answered.
"""

import asyncio
import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Literal

import pydantic
import pytest

URL = os.environ["JPAGED_URL"]
KEY = {"base_url": URL, "api_key": "none"}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "OPENAI_API_KEY": "none"}


Name = Literal["Paris", "Rome"]
"""Bounds what the small model writes, so that its JSON ends within the limit of tokens."""


class City(pydantic.BaseModel):
    """A city; further fields, which its schema would else allow, have no end either."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Name


def weather(city: Name) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": SCHEMA}}


@pytest.mark.client("openai", "chat, stream")
def test_openai_chats():
    import openai

    client = openai.OpenAI(**KEY)
    options = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 16, "store": True}
    text = client.chat.completions.create(**options, metadata={"a": "b"}).choices[0].message.content
    pieces = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert text == "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)


@pytest.mark.client("openai", "tools with a schema of the answer")
def test_openai_calls_tools_and_parses():
    import openai

    client = openai.OpenAI(**KEY)
    tool = openai.pydantic_function_tool(City, name="find")
    options = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 64}
    options["parallel_tool_calls"] = False
    called = client.chat.completions.parse(**options, tools=[tool], tool_choice="required")
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, City)
    message = client.chat.completions.parse(**options, tools=[tool], response_format=City).choices[0].message
    assert message.tool_calls or isinstance(message.parsed, City)


@pytest.mark.client("openai", "responses, custom tools")
def test_openai_responds():
    import openai

    client = openai.OpenAI(**KEY)
    options = {"model": "demo", "temperature": 0, "max_output_tokens": 64, "include": ["reasoning.encrypted_content"]}
    options |= {"input": MESSAGES, "truncation": "auto", "reasoning": {"effort": "low", "summary": "auto"}}
    assert client.responses.create(**options).output_text
    with client.responses.stream(**options, text_format=City) as stream:
        events = [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, City) and "response.completed" in events
    tools = [{"type": "custom", "name": "run"}, {"type": "web_search"}]
    called = client.responses.create(**options, tools=tools, tool_choice={"type": "custom", "name": "run"})
    assert called.output[0].type == "custom_tool_call"


@pytest.mark.client("litellm", "chat, stream, tools, cache_control")
def test_litellm():
    import litellm

    options = {"model": "openai/demo", "api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 64}
    answer = litellm.completion(messages=MESSAGES, tools=[TOOL], tool_choice="required", **options)
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    history = [*MESSAGES, message.model_dump(), result]
    history[0] = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    pieces = litellm.completion(messages=history, tools=[TOOL], stream=True, **options)
    assert list(pieces)


@pytest.mark.client("instructor", "tools, JSON schema")
def test_instructor():
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(**KEY), mode=mode)
        options = {"model": "demo", "messages": list(MESSAGES), "temperature": 0, "max_tokens": 64}
        if mode is instructor.Mode.TOOLS:
            options["parallel_tool_calls"] = False
        assert isinstance(client.chat.completions.create(**options, response_model=City, max_retries=0), City)


def pydantic_agents(output):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(**KEY)
    settings = {"temperature": 0, "max_tokens": 64}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        yield Agent(kind("demo", provider=provider), output_type=output, tools=[weather], model_settings=settings)


@pytest.mark.client("pydantic-ai-slim", "tools, native output with tools, chats and responses")
def test_pydantic_ai():
    from pydantic_ai import NativeOutput, UsageLimits
    from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded

    for output in (str, City, NativeOutput(City)):
        for agent in pydantic_agents(output):
            try:
                assert agent.run_sync(MESSAGES[0]["content"], usage_limits=UsageLimits(request_limit=3)).output
            except (UsageLimitExceeded, UnexpectedModelBehavior) as error:
                print(error)


@pytest.mark.client("openai-agents", "tools, output type with tools, chats and responses")
def test_openai_agents():
    import agents
    from openai import AsyncOpenAI

    client = AsyncOpenAI(**KEY)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        settings = agents.ModelSettings(temperature=0, max_tokens=64, include_usage=True)
        tools = [agents.function_tool(weather)]
        model = kind("demo", client)
        agent = agents.Agent("a", instructions="be brief", model=model, model_settings=settings, tools=tools)
        for each in (agent, agent.clone(output_type=City)):
            try:
                assert asyncio.run(agents.Runner.run(each, MESSAGES[0]["content"], max_turns=3)).final_output
            except (agents.MaxTurnsExceeded, agents.ModelBehaviorError) as error:
                print(error)


@pytest.mark.client("langchain-openai", "chat, stream, tools, JSON schema")
def test_langchain():
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="demo", temperature=0, max_tokens=64, max_retries=0, **KEY)
    text = MESSAGES[0]["content"]
    assert "".join(piece.content for piece in model.stream(text)) == model.invoke(text).content
    assert isinstance(model.with_structured_output(City, method="json_schema").invoke(text), City)
    assert model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(text).tool_calls
    tools = {"response_format": City, "strict": True, "parallel_tool_calls": False}
    both = model.bind_tools([weather], **tools).invoke(text)
    assert both.tool_calls or both.content


@pytest.mark.client("llama-index-llms-openai-like", "chat, stream, structured")
def test_llama_index():
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="demo", api_base=URL, api_key="none", is_chat_model=True, is_function_calling_model=True, max_tokens=64
    )
    messages = [ChatMessage(role="user", content="hi")]
    assert model.chat(messages).message.content and list(model.stream_chat(messages))
    assert isinstance(model.as_structured_llm(City).chat(messages).raw, City)


@pytest.mark.client("haystack-ai", "chat, tools")
def test_haystack():
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    options = {"max_tokens": 64, "temperature": 0}
    model = OpenAIChatGenerator(
        model="demo", api_base_url=URL, api_key=Secret.from_token("none"), generation_kwargs=options
    )
    messages = [ChatMessage.from_user("hi")]
    assert model.run(messages)["replies"][0].text
    tools = [Tool(name="weather", description="tells it", parameters=SCHEMA, function=weather)]
    reply = model.run(messages, tools=tools, generation_kwargs={"tool_choice": "required"})["replies"][0]
    assert reply.tool_calls[0].tool_name == "weather"


@pytest.mark.client("dspy", "predict as JSON")
def test_dspy():
    import dspy

    model = dspy.LM("openai/demo", api_base=URL, api_key="none", max_tokens=64, temperature=0, cache=False)
    with (
        dspy.context(lm=model, adapter=dspy.JSONAdapter()),
        contextlib.suppress(dspy.utils.exceptions.AdapterParseError),
    ):
        assert dspy.Predict("question -> answer: bool")(question="Is Paris in France?").answer in (True, False)


@pytest.mark.client("smolagents", "chat, tools")
def test_smolagents():
    from smolagents import OpenAIServerModel, tool

    @tool
    def rain(city: str) -> str:
        """Tell the rain.

        Args:
            city: a city
        """
        return city

    model = OpenAIServerModel("demo", api_base=URL, api_key="none", max_tokens=64, temperature=0)
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert model.generate(messages).content
    assert model.generate(messages, tools_to_call_from=[rain]).tool_calls


@pytest.mark.client("lm_eval", "local-completions: log-likelihoods and texts")
def test_lm_eval():
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        model="demo", base_url=f"{URL}/completions", tokenizer_backend=None, num_concurrent=1, max_length=1024
    )
    requests = [Instance("generate_until", {}, ("One, two,", {"until": ["\n"], "max_gen_toks": 8}), 0)]
    assert model.generate_until(requests)[0]
    assert json.dumps({"max": model.max_length})


@pytest.mark.client("anthropic", "message, stream, tools, count of tokens, models")
def test_anthropic():
    import anthropic

    client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
    asked = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    options = {"max_tokens": 32, "extra_body": {"top_k": 1}}
    whole = client.messages.create(**asked, **options)
    with client.messages.stream(**asked, **options) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == whole.stop_reason
    assert text == whole.content[0].text
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tools = [{"name": "weather", "description": "tells the weather", "input_schema": schema}]
    choice = {"type": "tool", "name": "weather"}
    called = client.messages.create(**asked, **options | {"max_tokens": 64}, tools=tools, tool_choice=choice)
    (use,) = (block for block in called.content if block.type == "tool_use")
    assert called.stop_reason == "tool_use" and use.input["city"] in ("Paris", "Rome")
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    (listed,) = client.models.list()
    assert listed.id == "demo" and client.models.retrieve("demo") == listed
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked | {"model": "nothing"}, **options)


def run_in_node(name: str) -> None:
    """Run a module next to this file, with the packages of npm that `run.sh` has installed."""
    module = (Path(__file__).parent / f"{name}.mjs").read_text(encoding="utf-8")
    done = subprocess.run(
        ["node", "--input-type=module"], input=module, cwd=os.environ["JPAGED_NPM"], text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.client("openai (npm)", "chat, stream, tools, JSON schema, responses")
def test_openai_of_npm():
    run_in_node("openai")


@pytest.mark.client("@anthropic-ai/sdk (npm)", "message, stream, tools, count of tokens, models")
def test_anthropic_of_npm():
    run_in_node("anthropic")


@pytest.mark.client("ai (npm)", "text, stream, tools, JSON schema")
def test_ai_of_npm():
    run_in_node("ai")

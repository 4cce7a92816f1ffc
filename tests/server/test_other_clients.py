"""Clients of other projects talk to the server unchanged."""

import pytest
import wanted

MESSAGES = [{"role": "user", "content": "hello"}]
pytestmark = pytest.mark.nightly


def test_litellm_talks_streams_and_knows_errors(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks GitHub for prices
    litellm = wanted.module("litellm")
    options = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "none", "max_tokens": 8, "seed": 3}
    answer = litellm.completion(messages=MESSAGES, **options)
    pieces = litellm.completion(messages=MESSAGES, stream=True, **options)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == answer.choices[0].message.content and answer.usage.completion_tokens <= 8
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=MESSAGES, temperature=-1, **options)


def test_langchain_talks_streams_and_gets_structured_answers(server):
    langchain = wanted.module("langchain_openai")
    options = {"model": "tiny", "base_url": f"{server.url}/v1", "api_key": "none", "max_tokens": 8, "seed": 3}
    model = langchain.ChatOpenAI(**options)
    text = model.invoke("hello").content
    assert "".join(piece.content for piece in model.stream("hello")) == text
    schema = {"title": "answer", "type": "object", "properties": {"yes": {"const": True}}, "required": ["yes"]}
    schema["additionalProperties"] = False
    long = langchain.ChatOpenAI(**options | {"max_tokens": 60})
    assert long.with_structured_output(schema, method="json_schema").invoke("hello") == {"yes": True}


def test_anthropic_talks_streams_counts_and_knows_errors(server):
    anthropic = wanted.module("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked = {"model": "tiny", "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = client.messages.create(max_tokens=8, **asked)
    with client.messages.stream(max_tokens=8, **asked) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == whole.content[0].text
    assert message.stop_reason == whole.stop_reason
    usage = whole.usage
    counted = client.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens and usage.output_tokens <= 8
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        client.messages.create(max_tokens=8, model="tiny", messages=[{"role": "user", "content": "hello " * 2000}])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(max_tokens=8, model="nothing", messages=MESSAGES)

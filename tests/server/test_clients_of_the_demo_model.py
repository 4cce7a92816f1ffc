"""The three clients talk to a server of the demo model, and its answers make sense."""

import asyncio

import openai
import pydantic
import pytest
import wanted
from live_server import LiveServer

from jpaged import LLM, AsyncLLM
from jpaged.server.settings import ServerSettings

pytestmark = pytest.mark.nightly
MODEL = "smollm2-135m"
ASKED = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": ASKED}]


class City(pydantic.BaseModel):
    """What the model fills in."""

    name: str


@pytest.fixture(scope="module")
def url():
    llm = LLM(MODEL, kv_cache_memory_bytes=2**27, max_model_len=512, max_num_seqs=4)
    server = LiveServer(AsyncLLM.from_llm(llm), ServerSettings(model=MODEL, port=0))
    yield f"{server.url}/v1"
    server.stop()
    assert llm.control.engine.memory.num_used_blocks == 0


def test_openais_client_talks_streams_and_parses(url):
    options = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    with openai.OpenAI(base_url=url, api_key="none", timeout=300) as client:
        whole = client.chat.completions.create(**options, max_completion_tokens=24)
        text = whole.choices[0].message.content
        assert "Paris" in text and whole.usage.prompt_tokens > 8
        pieces = list(client.chat.completions.create(**options, max_completion_tokens=24, stream=True))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text and len(pieces) > 5
        parsed = client.chat.completions.parse(**options, max_completion_tokens=60, response_format=City)
        assert isinstance(parsed.choices[0].message.parsed, City)
        response = client.responses.create(model=MODEL, input=ASKED, temperature=0, max_output_tokens=24)
        assert response.output_text == text
        more = client.completions.create(model=MODEL, prompt="One, two, three, four,", max_tokens=4, temperature=0)
        assert "five" in more.choices[0].text


def test_openais_asynchronous_client_streams_several_at_once(url):
    async def main():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=300) as client:

            async def one():
                stream = await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=24, stream=True
                )
                return "".join([piece.choices[0].delta.content or "" async for piece in stream])

            return await asyncio.gather(*(one() for _ in range(6)))

    assert all("Paris" in text for text in asyncio.run(main()))


def test_litellm_talks_and_streams(url, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks GitHub for prices
    litellm = wanted.module("litellm")
    options = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 24}
    text = litellm.completion(messages=MESSAGES, timeout=300, **options).choices[0].message.content
    pieces = litellm.completion(messages=MESSAGES, stream=True, timeout=300, **options)
    assert "Paris" in text and "".join(piece.choices[0].delta.content or "" for piece in pieces) == text


def test_langchain_talks_streams_and_gets_structured_answers(url):
    langchain = wanted.module("langchain_openai")
    model = langchain.ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=60, timeout=300, max_retries=0
    )
    text = model.invoke(ASKED).content
    assert "Paris" in text and "".join(piece.content for piece in model.stream(ASKED)) == text
    assert model.batch([ASKED, ASKED])[1].content == text
    assert isinstance(model.with_structured_output(City, method="json_schema").invoke(ASKED), City)

"""Images over HTTP: what the engine says of them, whole and streamed, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io

import pytest
from live_server import LiveServer, make_llm
from vision_checkpoints import make_gemma3, picture

from jpaged import AsyncLLM, SamplingParams
from jpaged.server.kept_state import KeptState
from jpaged.server.settings import ServerSettings

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served-gemma3")
    make_gemma3(folder)
    return make_llm(str(folder))


@pytest.fixture
def server_of(llm):
    server = LiveServer(AsyncLLM.from_llm(llm), ServerSettings(model="tiny", port=0))
    yield server
    server.stop()
    assert llm.control.engine.memory.num_used_blocks == 0


def url_of(image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def messages(*urls: str):
    images = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "what is it "}, *images]}]


def test_an_image_in_a_message_is_seen_as_the_engine_sees_it(llm, request):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    wanted = [llm.chat(messages(url_of(picture(i))), params, use_tqdm=False)[0].outputs[0] for i in range(2)]
    assert abs(wanted[0].cumulative_logprob - wanted[1].cumulative_logprob) > 0.01, "the images should matter"
    server = request.getfixturevalue("server_of")
    body = {"model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": True}
    for i, one in enumerate(wanted):
        asked = body | {"messages": messages(url_of(picture(i)))}
        whole = server.answer(CHAT, asked)["choices"][0]["logprobs"]["content"]
        streamed = [choice for chunk in server.chunks(CHAT, asked) for choice in chunk["choices"] if choice["logprobs"]]
        for told in (whole, [token for choice in streamed for token in choice["logprobs"]["content"]]):
            assert len(told) == 8
            assert sum(token["logprob"] for token in told) == pytest.approx(one.cumulative_logprob, abs=1e-4)


def test_a_response_sees_the_image_of_its_input(server_of):
    url = url_of(picture(0))
    same = {"model": "tiny", "seed": 1, "ignore_eos": True}
    chat = same | {"max_tokens": 40, "messages": messages(url)}
    want = server_of.answer(CHAT, chat)
    parts = [{"type": "input_text", "text": "what is it "}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    body = same | {"max_output_tokens": 40, "input": [{"role": "user", "content": parts}]}
    got = server_of.answer("/v1/responses", body)
    assert got["usage"]["input_tokens"] == want["usage"]["prompt_tokens"]
    assert got["output"][0]["content"][0]["text"] == want["choices"][0]["message"]["content"]


def test_a_server_of_a_model_with_eyes_keeps_its_state(llm, tmp_path):
    engine = AsyncLLM.from_llm(llm)
    kept = KeptState(engine, tmp_path, 30.0)

    async def start():
        try:
            await kept.restore()
            await kept.save_last()
            return await engine.load_state(tmp_path)
        finally:
            await engine.shutdown()

    assert asyncio.run(start()) == []


def test_images_that_cannot_be_read_or_lie_elsewhere_are_refused_and_nothing_is_lost(server_of):
    for url, why in (
        ("data:image/png;base64,AAAA", "image 1 of 1"),
        ("file:///etc/passwd", "folders"),
        ("http://127.0.0.1:9/a.png", "hosts"),
    ):
        error = server_of.refusal(CHAT, {"model": "tiny", "messages": messages(url)})
        assert why in error["message"] and error["param"] == "messages.0.content.1.image_url", error
    error = server_of.refusal(CHAT, {"model": "tiny", "messages": messages(*[url_of(picture(0))] * 17)})
    assert "16" in error["message"] and error["param"] == "messages"
    assert server_of.used_blocks() == 0


def test_a_refused_image_is_named_by_its_path_in_whatever_request_it_was_sent(server_of):
    good, bad = url_of(picture(0)), "data:image/png;base64,AAAA"
    said = [*messages(good), {"role": "assistant", "content": "a cab"}, *messages(good, bad)]
    for path in (CHAT, "/tokenize"):
        error = server_of.refusal(path, {"model": "tiny", "messages": said})
        assert error["param"] == "messages.2.content.2.image_url", error
        assert error["message"].startswith("messages.2.content.2.image_url: image 3 of 3, "), error
    call = {"type": "web_search_call", "id": "w"}
    parts = [{"type": "input_image", "image_url": url} for url in (good, bad)]
    for truncation in ("disabled", "auto"):
        body = {"model": "tiny", "input": [call, {"role": "user", "content": parts}], "truncation": truncation}
        error = server_of.refusal("/v1/responses", body)
        assert error["param"] == "input.1.content.1.image_url", error


def test_of_a_cut_conversation_the_images_that_are_left_are_counted_from_the_end(server_of):
    filler = {"role": "user", "content": "the cab " * 400}
    said = [*messages(url_of(picture(0))), filler, *messages("data:image/png;base64,AAAA")]
    parts = [
        {
            "role": one["role"],
            "content": [
                {"type": "input_image", "image_url": part["image_url"]["url"]}
                for part in one["content"]
                if part["type"] == "image_url"
            ],
        }
        if isinstance(one["content"], list)
        else one
        for one in said
    ]
    error = server_of.refusal("/v1/responses", {"model": "tiny", "input": parts, "truncation": "auto"})
    assert error["param"] == "input.2.content.0.image_url" and "image 1 of 1, " in error["message"], error

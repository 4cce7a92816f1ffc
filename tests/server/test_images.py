"""Images over HTTP: what the engine says of them, whole and streamed, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io

import httpx
import numpy as np
import pytest
from gemma4_checkpoints import IMAGE, PROCESSOR, SIZES, pictures
from gemma4_checkpoints import make as make_gemma4
from live_server import LiveServer, make_llm
from PIL import Image
from recorded_answers import SCRIPTS
from scripted_model import ScriptedModel
from vision_checkpoints import make_gemma3, picture

from jpaged import LLM, AsyncLLM, ImageSources, SamplingParams
from jpaged.image_sources import MediaUrl
from jpaged.images import read_images
from jpaged.images import sources as sources_module
from jpaged.images.pixels import decoded
from jpaged.server.app import create_app
from jpaged.server.kept_state import KeptState
from jpaged.server.openai.bodies.responses import ResponsesRequest
from jpaged.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
WIDE, TALL, ONE, FULL, *_ = SIZES


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


def messages(*urls: str, detail: str = "auto"):
    images = [{"type": "image_url", "image_url": {"url": url, "detail": detail}} for url in urls]
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


def test_the_images_of_a_functions_output_are_seen_after_the_outputs(server_of):
    urls = [url_of(picture(i)) for i in range(3)]

    def image(i):
        return {"type": "input_image", "image_url": urls[i], "detail": "original"}

    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "look", "arguments": "{}"} for i in range(2)]
    outputs = [
        {"type": "function_call_output", "call_id": "c0", "output": [{"type": "input_text", "text": "one"}, image(0)]},
        {"type": "function_call_output", "call_id": "c1", "output": [image(1)]},
    ]
    same = {"model": "tiny", "seed": 1, "max_output_tokens": 4}
    asked = [{"role": "user", "content": "look"}, *calls, *outputs]
    for after in ([], [{"role": "user", "content": [{"type": "input_text", "text": "and "}, image(2)]}]):
        request = ResponsesRequest.model_validate(same | {"input": [*asked, *after]})
        *_, first, second, last = request.as_chat().messages
        assert (first.role, first.content, second.role, second.content) == ("tool", "one", "tool", "")
        assert last.role == "user"
        seen = [part.image_url.url for part in last.content if part.type == "image_url"]
        assert seen == urls[: len(seen)] and len(seen) == 2 + len(after)
    said = server_of.answer("/v1/responses", same | {"input": outputs})
    assert said["usage"]["input_tokens"] > 2 * 16
    bad = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    outputs[1]["output"].append(bad)
    error = server_of.refusal("/v1/responses", same | {"input": [*asked[:-2], *outputs]})
    assert error["param"] == "input.4.output.1.image_url" and "image 3 of 3" in error["message"], error
    for item in ({"role": "assistant", "content": [bad]}, {"role": "system", "content": [bad]}):
        error = server_of.refusal("/v1/responses", same | {"input": [item]})
        assert "only a message of the user and a function's output may have" in error["message"]


def test_an_image_in_a_tools_result_counts_as_one_of_the_user(server_of):
    data = url_of(picture(0)).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    said = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "see", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": []}]},
    ]
    counts = []
    for images in ([], [{"type": "image", "source": source}]):
        said[-1]["content"][0]["content"] = [{"type": "text", "text": "it"}, *images]
        body = {"model": "tiny", "max_tokens": 4, "messages": said}
        counted = server_of.answer("/v1/messages/count_tokens", {"model": "tiny", "messages": said})["input_tokens"]
        usage = server_of.answer("/v1/messages", body)["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
        counts.append(counted)
    assert counts[1] - counts[0] > 16


@pytest.mark.parametrize("add_special_tokens", [None, False, True])
def test_tokenize_counts_what_a_chat_computes(server_of, add_special_tokens):
    said = messages(url_of(picture(0)), url_of(picture(1)))
    same = {"model": "tiny", "messages": said}
    more = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
    counted = server_of.answer("/tokenize", same | more | {"return_token_strs": True})
    used = server_of.answer(CHAT, same | {"max_tokens": 1})["usage"]["prompt_tokens"]
    assert (
        counted["count"]
        == len(counted["tokens"])
        == used + bool(add_special_tokens) * counted["tokens"][:2].count(1) // 2
    )
    assert counted["token_strs"].count("<image>") == 32


@pytest.mark.nightly
def test_tokenize_counts_pictures_of_gemma_4_by_their_sizes(tmp_path):
    make_gemma4("gemma4_ahead", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", block_size=8, max_model_len=448, kv_cache_memory_bytes=8 << 20)
    server = LiveServer(AsyncLLM.from_llm(llm), ServerSettings(model="tiny", port=0))
    try:
        for shown in (pictures(WIDE), pictures(TALL, ONE), pictures(ONE, FULL, TALL)):
            same = {"model": "tiny", "messages": messages(*map(url_of, shown))}
            counted = server.answer("/tokenize", same)
            used = server.answer(CHAT, same | {"max_tokens": 1})["usage"]["prompt_tokens"]
            assert counted["count"] == len(counted["tokens"]) == used
            wanted = sum(PROCESSOR(each, return_tensors="pt")["num_soft_tokens_per_image"][0] for each in shown)
            assert counted["tokens"].count(IMAGE) == wanted
    finally:
        server.stop()


def test_settings_of_a_request_are_part_of_its_images_and_errors_name_them(server_of, llm):
    asked = {"model": "tiny", "messages": messages(url_of(picture(0))), "temperature": 0, "max_tokens": 1}
    asked |= {"logprobs": True}

    def score(**more):
        return server_of.answer(CHAT, asked | more)["choices"][0]["logprobs"]["content"][0]["logprob"]

    plain, before = score(), server_of.engine.stats().num_encoded_images
    other = {"mm_processor_kwargs": {"image_mean": [0.1, 0.2, 0.3]}}
    changed = score(**other)
    assert abs(changed - plain) > 1e-4 and score(**other) == pytest.approx(changed, abs=1e-5)
    assert score() == pytest.approx(plain, abs=1e-5)
    assert server_of.engine.stats().num_encoded_images == before + 1
    for settings, why in (
        ({"size": {"height": 2800}}, "may lower this bound, which is 28"),
        ({"pan": 1}, "has 'pan': the model's image processor has"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan=True is not supported"),
        ({"do_resize": "no"}, "must be true or false"),
    ):
        for path in (CHAT, "/tokenize"):
            error = server_of.refusal(
                path, {"model": "tiny", "messages": asked["messages"], "mm_processor_kwargs": settings}
            )
            assert why in error["message"] and error["param"] == "mm_processor_kwargs", error
    assert server_of.used_blocks() == 0


def test_low_detail_shrinks_a_picture_and_high_does_not(server_of):
    large = Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 600, 3), dtype=np.uint8))
    small = large.resize((round(600 * 512 / 700), 512), Image.Resampling.BICUBIC)
    before = server_of.engine.stats().num_encoded_images
    for image, detail in (
        (large, "low"),
        (small, "low"),
        (small, "high"),
        (small, "auto"),
        (large, "high"),
        (large, "auto"),
        (large, "original"),
    ):
        server_of.answer(CHAT, {"model": "tiny", "max_tokens": 1, "messages": messages(url_of(image), detail=detail)})
    assert server_of.engine.stats().num_encoded_images == before + 2, "the picture, and the picture of low detail"
    error = server_of.refusal(CHAT, {"model": "tiny", "messages": messages(url_of(small), detail="best")})
    assert "detail" in error["param"]


@pytest.mark.parametrize("taken", [False, True])
def test_features_of_images_need_a_flag_of_the_server(llm, taken):
    server = LiveServer(AsyncLLM.from_llm(llm), ServerSettings(model="tiny", port=0, enable_mm_embeds=taken))
    try:
        embeds = {"image_embeds": "AAAA", "image_grid_thw": [1, 4, 6]}
        content = [{"type": "text", "text": "a"}, {"type": "image_embeds", "image_embeds": embeds}]
        for path in (CHAT, "/tokenize"):
            error = server.refusal(path, {"model": "tiny", "messages": [{"role": "user", "content": content}]})
            if taken:
                assert "the model takes images as pictures, not as 'image_embeds'" in error["message"]
            else:
                assert error["param"] == "messages.0.content.1" and "--enable-mm-embeds" in error["message"]
    finally:
        server.stop()


def test_a_body_may_have_the_largest_image_that_the_engine_takes(llm):
    engine = AsyncLLM.from_llm(llm)
    settings = ServerSettings(model="tiny")
    assert settings.body_bytes(engine.max_media_bytes) > engine.config.images.max_bytes * 4 / 3 + 2**22
    assert settings.body_bytes(0) == 8 * 2**20
    assert ServerSettings(model="tiny", max_body_bytes=5).body_bytes(engine.max_media_bytes) == 5
    asyncio.run(engine.shutdown())


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


def test_the_images_of_a_conversation_are_fetched_and_decoded_once_however_often_it_is_cut(monkeypatch):
    fetched, decodes = [], []
    monkeypatch.setattr(sources_module, "decoded", lambda *args: decodes.append(1) or decoded(*args))

    class Fetching(ScriptedModel):
        def chat_prompt(self, messages, **options):
            for message in messages:
                for part in message["content"] if isinstance(message["content"], list) else ():
                    if part["type"] == "image_url" and isinstance(url := part["image_url"]["url"], MediaUrl):
                        url.bytes_by(lambda: fetched.append(1) or b"")
                    elif part["type"] == "image_url":
                        read_images(url, ImageSources())
            return super().chat_prompt(messages, **options)

    urls = ["http://pictures.example/a", url_of(picture(0))]
    images = [{"type": "input_image", "image_url": url} for url in urls]
    said = [{"role": "user", "content": "#text# " * 70}] * 7 + [{"role": "user", "content": images}]
    model = Fetching(SCRIPTS)
    app = create_app(model, ServerSettings(model="tiny"))

    async def main():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/responses", json={"input": said, "truncation": "auto"})

    answer = asyncio.run(main())
    assert answer.status_code == 200, answer.text
    assert len(model.prompts) > 2 and fetched == decodes == [1]


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

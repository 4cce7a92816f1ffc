"""Videos over HTTP: what the engine says of them, how they are counted, and what is refused by its path."""

from __future__ import annotations

import base64
import io

import av
import numpy as np
import pytest
from live_server import LiveServer, make_llm
from vision_checkpoints import make_llava

from jpaged import AsyncLLM, SamplingParams
from jpaged.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'video' %}<end>"
    "{% elif part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served-llava")
    make_llava(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return make_llm(str(folder))


@pytest.fixture
def server(llm):
    server = LiveServer(AsyncLLM.from_llm(llm), ServerSettings(model="tiny", port=0))
    yield server
    server.stop()
    assert llm.control.engine.memory.num_used_blocks == 0


def film(seed: int, number: int = 10) -> str:
    file, rng = io.BytesIO(), np.random.default_rng(seed)
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for _ in range(number):
            pixels = np.kron(rng.integers(0, 256, (4, 6, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return "data:video/mp4;base64," + base64.b64encode(file.getvalue()).decode()


def messages(*urls: str):
    videos = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "what is it "}, *videos]}]


def test_a_video_in_a_message_is_seen_and_counted_as_the_engine_does(llm, request):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    kwargs = {"num_frames": 4}
    wanted = [llm.chat(messages(film(i)), params, mm_processor_kwargs=kwargs, use_tqdm=False)[0] for i in range(2)]
    assert abs(wanted[0].outputs[0].cumulative_logprob - wanted[1].outputs[0].cumulative_logprob) > 0.01
    server = request.getfixturevalue("server")
    body = {"model": "tiny", "temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": True}
    for i, one in enumerate(wanted):
        asked = {"messages": messages(film(i)), "mm_processor_kwargs": kwargs}
        answer = server.answer(CHAT, body | asked)
        scores = [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]
        assert sum(scores) == pytest.approx(one.outputs[0].cumulative_logprob, abs=1e-4)
        counted = server.answer("/tokenize", {"model": "tiny", **asked})
        assert counted["count"] == answer["usage"]["prompt_tokens"] == len(one.prompt_token_ids)
        assert counted["tokens"].count(39) == 4 * 4 + 1


def test_a_video_that_is_refused_is_named_by_its_path_and_nothing_is_lost(server):
    good, bad = film(0, 2), "data:video/mp4;base64,AAAA"
    for url, why in ((bad, "video 2 of 2"), ("file:///etc/passwd", "folders"), ("http://127.0.0.1:9/a", "hosts")):
        for path in (CHAT, "/tokenize"):
            error = server.refusal(path, {"model": "tiny", "messages": messages(good, url)})
            assert why in error["message"] and error["param"] == "messages.0.content.2.video_url", error
    five = server.refusal(CHAT, {"model": "tiny", "messages": messages(*[good] * 5)})
    assert "5 videos were given, the limit is max_videos=4" in five["message"] and five["param"] == "messages"
    for kwargs in ({"fps": -1}, {"num_frames": 0}, {"fps": 1, "num_frames": 1}):
        body = {"model": "tiny", "messages": messages(good), "mm_processor_kwargs": kwargs}
        assert server.refusal(CHAT, body)["param"] == "mm_processor_kwargs"
    assert server.used_blocks() == 0

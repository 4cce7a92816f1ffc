"""Adapters are models of the server: listed, chosen by `model`, refused by name."""

from __future__ import annotations

import asyncio
import json

import pytest
import typer
from live_server import SETTINGS, LiveServer
from lora_checkpoints import save_adapter

from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.server.app import create_app
from jpaged.server.batch import BatchRequest, run_batch
from jpaged.server.settings import ServerSettings


@pytest.fixture(scope="module")
def adapted(tiny_folder, tmp_path_factory):
    folder = save_adapter(
        tiny_folder, tmp_path_factory.mktemp("adapter"), "poet", r=4, lora_alpha=64, target_modules="all-linear"
    )
    return LLM(tiny_folder, kv_cache_memory_bytes=2**23, enable_lora=True, lora_modules={"poet": folder}, **SETTINGS)


def test_a_request_names_an_adapter_as_its_model(adapted):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 6, 7, 8]}] * 2
    plain, poet = (output.outputs[0].token_ids for output in adapted.generate(prompts, params, False, [None, "poet"]))
    assert plain != poet
    server = LiveServer(AsyncLLM.from_llm(adapted), ServerSettings(model="tiny", port=0))
    try:
        listed = server.http.get("/v1/models").json()["data"]
        assert [(model["id"], model["parent"]) for model in listed] == [("tiny", None), ("poet", "tiny")]
        assert server.http.get("/v1/models/poet").json()["root"] == "tiny"
        body = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        for name, expected in (("tiny", plain), ("poet", poet)):
            answer = server.http.post("/v1/completions", json={**body, "model": name}).json()
            assert answer["model"] == name
            assert answer["choices"][0]["text"] == adapted.tokenizer.decode(expected, skip_special_tokens=True)
        refused = server.http.post("/v1/completions", json={**body, "model": "other"})
        assert refused.status_code == 404 and "this server has tiny, poet" in refused.json()["error"]["message"]
        chat = {"model": "poet", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert server.http.post("/v1/chat/completions", json=chat).json()["model"] == "poet"
    finally:
        server.stop()


def test_a_file_of_requests_names_adapters_too(adapted, tmp_path):
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    requests = [BatchRequest(name, "/v1/completions", body | {"model": name}) for name in ("tiny", "poet", "other")]
    output = tmp_path / "out.jsonl"

    async def run():
        async with AsyncLLM.from_llm(adapted) as engine:
            app = create_app(engine, ServerSettings(model="tiny"))
            return await run_batch(app, requests, output, concurrency=3)

    assert asyncio.run(run()) == 1
    found = {one["custom_id"]: one["response"] for one in map(json.loads, output.read_text().splitlines())}
    assert found["other"]["status_code"] == 404
    texts = [found[name]["body"]["choices"][0]["text"] for name in ("tiny", "poet")]
    assert texts[0] != texts[1]


def test_an_adapter_may_not_have_the_models_name(adapted):
    with pytest.raises(ValueError, match="lora_modules has 'poet', which is also a name of the model"):
        LiveServer(AsyncLLM.from_llm(adapted), ServerSettings(model="poet", port=0))


def settings_given(**flags):
    """Return the settings that `jpaged serve` makes of some flags."""
    made = []

    @with_engine_options("serve")
    def command(*, engine: EngineOptions) -> None:
        made.append(engine.settings())

    command(**flags)
    return made[0]


def test_the_command_line_takes_names_with_folders():
    settings = settings_given(lora_modules=["a=/x", "b=/y=z"], max_loras=2)
    assert settings["lora_modules"] == {"a": "/x", "b": "/y=z"} and settings["enable_lora"]
    assert not settings_given()["enable_lora"]
    with pytest.raises(typer.BadParameter, match="lora_modules='a' must be name=folder"):
        settings_given(lora_modules=["a"])
    with pytest.raises(typer.BadParameter, match="two folders one name: a, a"):
        settings_given(lora_modules=["a=x", "a=y"])

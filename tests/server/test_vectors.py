"""`/v1/embeddings`, `/classify`, `/v1/score` and `/v1/rerank` answer with what `LLM.embed` and its kin give."""

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import numpy as np
import pytest
import torch
from live_server import LiveServer
from scripted_model import ScriptedModel
from transformers import LlamaConfig, LlamaForSequenceClassification

from jpaged import LLM, AsyncLLM
from jpaged.outputs import EmbeddingOutput, PoolingRequestOutput
from jpaged.server.access import Key
from jpaged.server.app import create_app
from jpaged.server.settings import ServerSettings

TEXTS = ["where is the cab", "no", "it was a day of rain and of little else"]


@pytest.fixture(scope="module")
def expected(tiny_llm):
    vectors = [output.outputs.embedding for output in tiny_llm.embed(TEXTS, use_tqdm=False)]
    scores = [output.outputs.score for output in tiny_llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    return np.array(vectors), scores


@pytest.fixture
def post(expected, serve):  # the vectors are made before a server takes the engine
    server = serve()
    return lambda path, **body: httpx.post(f"{server.url}{path}", json=body, timeout=120)


def test_vectors_are_those_of_embed_as_numbers_and_as_bytes(post, expected):
    answer = post("/v1/embeddings", input=TEXTS).json()
    assert answer["object"] == "list" and answer["model"] == "tiny"
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    np.testing.assert_allclose([row["embedding"] for row in answer["data"]], expected[0], atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    (row,) = post("/v1/embeddings", input=TEXTS[1], encoding_format="base64", dimensions=8).json()["data"]
    numbers = np.frombuffer(base64.b64decode(row["embedding"]), "<f4")
    cut = expected[0][1][:8]
    np.testing.assert_allclose(numbers, cut / np.linalg.norm(cut), atol=1e-5)


def test_scores_and_ranks_are_those_of_score(post, expected):
    scored = post("/v1/score", text_1=TEXTS[0], text_2=TEXTS).json()["data"]
    np.testing.assert_allclose([row["score"] for row in scored], expected[1], atol=1e-5)
    ranked = post("/v1/rerank", query=TEXTS[0], documents=TEXTS, top_n=2).json()["results"]
    assert len(ranked) == 2 and ranked[0]["index"] == 0 and ranked[0]["document"] == {"text": TEXTS[0]}
    assert ranked[0]["relevance_score"] >= ranked[1]["relevance_score"]


def test_documents_may_be_objects_and_coheres_second_path_is_the_same(post):
    ranked = post("/v1/rerank", query=TEXTS[0], documents=TEXTS).json()["results"]
    objects = [{"text": text} for text in TEXTS]
    for path in ("/v2/rerank", "/rerank"):
        assert post(path, query=TEXTS[0], documents=[*objects[:2], TEXTS[2]]).json()["results"] == ranked


def test_classes_are_those_of_classify_with_the_name_of_the_likeliest(tmp_path):
    folder = tmp_path / "classes"
    config = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    torch.manual_seed(0)
    names = {0: "good", 1: "bad", 2: "late"}
    of_layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    LlamaForSequenceClassification(LlamaConfig(**config, **of_layers, id2label=names)).save_pretrained(folder)
    prompts = [[5, 6, 7], [8]]
    with LLM(folder, max_model_len=32, enforce_eager=True, dtype="float32") as llm:
        want = [output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)]
        server = LiveServer(AsyncLLM.from_llm(llm), ServerSettings(model="classes", port=0))
        answer = httpx.post(f"{server.url}/classify", json={"input": prompts}, timeout=120).json()
        server.stop()
    np.testing.assert_allclose([row["probs"] for row in answer["data"]], want, atol=1e-6)
    assert [row["label"] for row in answer["data"]] == [names[int(np.argmax(probs))] for probs in want]
    assert all(row["num_classes"] == 3 for row in answer["data"]) and answer["usage"]["prompt_tokens"] == 4


def test_prompts_of_many_clients_run_at_once_though_there_is_one_thread_to_tokenise_them(expected, tiny_llm):
    async def main():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        engine, all_there = AsyncLLM.from_llm(tiny_llm), asyncio.Barrier(len(TEXTS))

        @asynccontextmanager
        async def place():
            await all_there.wait()
            yield

        try:
            async with asyncio.timeout(120):
                return await asyncio.gather(*(engine.embed(text, place=place) for text in TEXTS))
        finally:
            await engine.shutdown()

    found = asyncio.run(main())
    np.testing.assert_allclose([one.outputs.embedding for (one,) in found], expected[0], atol=1e-5)


class Vectors(ScriptedModel):
    """Gives each prompt the same vector once it has a place."""

    num_begun = 0

    async def embed(self, prompts, params, *, lora_request, place):
        async def one(i):
            async with place():
                self.num_begun += 1
                return PoolingRequestOutput(i, EmbeddingOutput([1.0]), [1])

        return await asyncio.gather(*map(one, range(len(prompts))))


def test_prompts_wait_for_their_keys_places_at_the_engine():
    keys = Key.of("one", "alice"), Key.of("two", "bob")
    model = Vectors({})
    app = create_app(model, ServerSettings(model="tiny", keys=keys, max_waiting=4))

    async def main():
        transport = httpx.ASGITransport(app)
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
            AsyncExitStack() as held,
        ):
            queue, headers = app.state.serving.queue, {"Authorization": "Bearer two"}
            for _ in range(model.config.max_num_seqs + 4):  # all places
                await held.enter_async_context(queue.place(keys[0]))
            posted = [
                asyncio.create_task(client.post("/v1/embeddings", json={"input": ["a"] * 4}, headers=headers))
                for _ in range(5)
            ]
            done, _ = await asyncio.wait(posted, return_when=asyncio.FIRST_COMPLETED)
            assert [one.result().status_code for one in done] == [429] and model.num_begun == 0
            await held.aclose()
            return await asyncio.gather(*posted)

    statuses = sorted(one.status_code for one in asyncio.run(asyncio.wait_for(main(), 60)))
    assert statuses == [200] * 4 + [429] and model.num_begun == 16


REFUSED = [
    ("/v1/embeddings", {"input": []}, "input has 0 prompts"),
    ("/v1/embeddings", {"input": "a", "dimensions": 10_000}, "dimensions=10000 is above the model's"),
    ("/v1/embeddings", {"input": "a", "dimensions": 2**75}, "dimensions=37778931862957161709568 must be in [1, "),
    ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "none of the model's prompts"),
    ("/v1/embeddings", {"input": ["a", [99999]]}, "prompt 1: input: token id 99999"),
    ("/v1/embeddings", {"input": "a", "model": "other"}, "other"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts and text_2 3"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents has 0 prompts"),
    ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents.0"),
    ("/classify", {"input": "a"}, "has no head for classes"),
]


def test_a_text_that_is_too_long_is_named_by_the_field_that_holds_it(post):
    long = "the cab " * 300
    for path, body, param, subject in (
        ("/v1/embeddings", {"input": ["a", long]}, "input", "input: prompt 1: the prompt has"),
        ("/v1/score", {"text_1": "a", "text_2": long}, "text_2", "text_2: the prompt has"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", long]}, "text_2", "text_2[1]: the prompt has"),
        ("/v1/score", {"text_1": ["a", long], "text_2": ["a", "b"]}, "text_1", "text_1[1]: the prompt has"),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["b", "c", long * 100]},
            "documents",
            "documents[2]: the prompt has",
        ),
        ("/v1/rerank", {"query": long, "documents": ["b", "c"]}, "query", "query: the prompt has"),
    ):
        error = post(path, **body).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded"), error
        assert error["message"].startswith(subject) and "max_model_len=128" in error["message"], error


def test_what_cannot_be_answered_is_refused(post):
    for path, body, words in REFUSED:
        answer = post(path, **body)
        assert answer.status_code in (400, 404), answer.text
        assert words in answer.json()["error"]["message"]

"""`LLM.memory_map` and `AsyncLLM.memory_map` on a running engine."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest
from tiny_chat_model import make_chat_model

from jpaged import LLM, AsyncLLM, MemoryMap, SamplingParams
from jpaged.memory import BlockState
from jpaged.server.memory_page import MemoryFeed

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SHARED = list(range(3, 67))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    settings = {"block_size": 8, "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
    return LLM(str(folder), dtype="float32", kv_cache_memory_bytes=1 << 20, **settings)


def assert_as_reported(seen: MemoryMap, llm: LLM) -> None:
    report = llm.memory_report()
    for shown, counted in zip(seen.groups, report.groups, strict=True):
        assert (shown.name, shown.used, shown.cached) == (counted.name, counted.used, counted.evictable)
        assert shown.empty == counted.empty and shown.block_bytes == counted.block_bytes
    assert (seen.num_pages, seen.free_pages) == (report.num_pages, report.free_pages)


def test_a_map_between_two_deltas_shows_who_runs_and_one_afterwards_what_stays_cached(llm):
    prompts = [{"prompt_token_ids": [*SHARED, 70 + i]} for i in range(3)]
    maps = []
    for _ in llm.stream(prompts, PARAMS):
        maps.append(llm.memory_map())
        assert_as_reported(maps[-1], llm)
    requests = [{int(row["request"]) for row in seen.groups[0].blocks if row["owners"]} for seen in maps]
    assert len(requests[0]) == 3 and min(requests[0]) >= 0
    assert maps[0].groups[0].shared, "the prompts begin alike"
    idle = llm.memory_map()
    assert_as_reported(idle, llm)
    assert [group.used for group in idle.groups] == [0] and idle.groups[0].cached
    assert len({int(p) for p in idle.groups[0].blocks["prefix"] if p}) == 1
    assert idle.changes(llm.memory_map()).count == 0
    assert idle.changes(maps[0]).count > 0
    assert "large pages" in idle._repr_html_()


def test_every_token_is_in_the_map_and_the_report_of_its_own_step(llm):
    """The block that is being filled, too: the memory is told of it where it ends."""
    prompt, tokens = [5] * 11, []
    for _ in llm.stream([{"prompt_token_ids": prompt}], PARAMS):
        seen, counted = llm.memory_map().groups[0], llm.memory_report().groups[0]
        assert seen.used_tokens * llm.control.engine.memory.layout.groups[0].spec.real_bytes // 8 == counted.token_bytes
        tokens.append(seen.used_tokens)
    assert tokens[0] >= len(prompt)
    assert tokens[:-1] == list(range(tokens[0], tokens[0] + len(tokens) - 1)), "the last one ends the request"


def test_a_replica_that_is_not_there_is_refused(llm):
    with pytest.raises(ValueError, match="replica='first' is not one of the 1 replicas"):
        llm.memory_report(replica="first")
    with pytest.raises(ValueError, match="peak='no' must be True or False"):
        llm.memory_report(peak="no")
    with pytest.raises(ValueError, match="replica=1 is not one of the 1 replicas"):
        llm.memory_map(replica=1)


def test_clients_of_an_async_engine_find_their_requests_by_name(llm):
    async def main() -> MemoryMap:
        engine = AsyncLLM.from_llm(llm)
        try:
            async for _ in engine.generate({"prompt_token_ids": SHARED}, PARAMS, "my-request"):
                seen = await engine.memory_map()
                break
            with pytest.raises(ValueError, match="replica=-1"):
                await engine.memory_map(replica=-1)
            return seen
        finally:
            await engine.shutdown()

    seen = asyncio.run(asyncio.wait_for(main(), 60))
    (named,) = seen.request_names
    assert seen.request_names[named] == "my-request"
    blocks = [seen.block(0, i) for i in range(len(seen.groups[0].blocks))]
    mine = [block for block in blocks if block.request == named]
    assert sum(block.tokens for block in mine) >= len(SHARED)
    assert {block.state for block in mine} == {BlockState.USED}


def test_the_memory_page_follows_a_running_engine_until_it_is_shut_down(llm):
    async def main() -> list[dict]:
        engine = AsyncLLM.from_llm(llm)
        told: list[dict] = []

        async def watch() -> None:
            async with aclosing(MemoryFeed(engine, interval=0.01).messages()) as messages:
                async for message in messages:
                    told.append(json.loads(message))

        watching = asyncio.create_task(watch())
        async for _ in engine.generate({"prompt_token_ids": SHARED}, PARAMS, "watched"):
            pass
        before = len(told)
        while len(told) < before + 2:
            await asyncio.sleep(0.001)
        await engine.shutdown()
        await watching
        return told

    told = asyncio.run(asyncio.wait_for(main(), 60))
    assert told[0]["pool"]["groups"][0]["perPage"] == 1
    assert told[-1]["stats"]["promptTokens"] > 0

"""Marked prefixes over HTTP: they stay under pressure, and usage tells which tokens they and the tiers account for."""

import re

import pytest
from live_server import SETTINGS, LiveServer

from jpaged import LLM, AsyncLLM, CompletionOutput, RequestOutput
from jpaged.server.cache_use import CacheUse, details, split
from jpaged.server.settings import ServerSettings

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
LONG = "the cab is far and the bed is bad, so a cafe is a fad, too"
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def marking(serve, tiny_llm):
    memory = tiny_llm.control.engine.memory
    server = serve()
    server.memory = memory
    return server


def text(words, **more):
    return {"type": "text", "text": words, **more}


def messages(server, *said, **more):
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": list(said)}], **more}
    return server.answer(MESSAGES, body)["usage"]


def press(server):
    """Fill the pool with other prompts."""
    (group,) = server.memory.layout.groups
    for number in range(group.num_blocks // 14 + 2):
        server.complete(prompt=[number % 90 + 3, *range(3, 120)], max_tokens=1)


def test_a_marked_prefix_stays_under_pressure_and_an_unmarked_one_is_lost(marking):
    one, other = text("1 " + LONG), text("2 " + LONG)
    first = messages(marking, one | EPHEMERAL, text("why?"))
    assert first["cache_creation_input_tokens"] >= 24
    assert first["cache_creation"] == {
        "ephemeral_5m_input_tokens": first["cache_creation_input_tokens"],
        "ephemeral_1h_input_tokens": 0,
    }
    assert "cache_creation" not in messages(marking, other, text("why?"))
    press(marking)
    again = messages(marking, one | EPHEMERAL, text("who?"))
    assert again["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert again["cache_creation_input_tokens"] == 0
    assert messages(marking, other, text("who?"))["cache_read_input_tokens"] < 16


@pytest.mark.parametrize("where", ["part", "message", "tool"])
def test_chats_mark_prefixes_too(marking, where):
    part, message = text(f"{where} {LONG}"), {"role": "system"}
    if where == "part":
        message["content"] = [part | EPHEMERAL]
    else:
        message |= {"content": [part], **(EPHEMERAL if where == "message" else {})}
    body = {"max_tokens": 2, "messages": [message, {"role": "user", "content": "why?"}]}
    if where == "tool":
        body["tools"] = [{"type": "function", "function": {"name": "f"}, **EPHEMERAL}]
        body["tool_choice"] = "none"
        assert marking.refusal(CHAT, body | {"tool_choice": "auto"})["param"] == "tools"  # it has no parser
        return
    marking.answer(CHAT, body)
    press(marking)
    body["messages"][1]["content"] = "who?"
    assert marking.answer(CHAT, body)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 24


def test_each_life_counts_the_tokens_from_the_mark_before():
    output = RequestOutput("a", None, list(range(100)), num_cached_tokens=16)
    found = CacheUse.of(RequestOutput(**vars(output) | {"kept_prefixes": [(64, 300.0), (40, 3600.0), (8, 300.0)]}))
    assert found == CacheUse(written={3600.0: 24, 300.0: 24})
    assert CacheUse.of(output) == CacheUse()


def test_usage_splits_cached_tokens_by_where_they_were():
    one = CompletionOutput(0, "", [], None, None)
    tiers = RequestOutput("a", None, [1] * 90, [one], num_cached_tokens=80, num_cached_by_tier={"ram": 30, "disk": 40})
    plain = RequestOutput("b", None, [1] * 90, [one], num_cached_tokens=16)
    assert split(tiers) == {"pool": 10, "ram": 30, "disk": 40} and split(plain) == {}
    assert details(16, [split(plain)]) == {"cached_tokens": 16}
    both = details(96, map(split, (tiers, plain)))
    assert both == {"cached_tokens": 96, "cached_tokens_by_tier": {"pool": 26, "ram": 30, "disk": 40}}


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_usage_events_and_metrics_tell_what_a_tier_gave(tiny_folder, tmp_path, tier):
    options = {
        "ram": {"kv_offloading_size": 1 / 64, "kv_offloading_break_even": 1},
        "disk": {"disk_folder": str(tmp_path), "disk_space": 1 / 64, "disk_break_even": 1},
    }[tier]
    llm = LLM(tiny_folder, kv_cache_memory_bytes=2**23, kv_cache_events=100_000, **SETTINGS, **options)
    memory = llm.control.engine.memory
    server = LiveServer(AsyncLLM.from_llm(llm), ServerSettings(model="tiny", port=0))
    server.memory = memory
    try:
        prompt = [*range(40, 73)]
        first = server.complete(prompt=prompt, max_tokens=2, temperature=0)
        assert "cached_tokens_by_tier" not in first["usage"]["prompt_tokens_details"]
        press(server)
        again = server.complete(prompt=prompt, max_tokens=2, temperature=0)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        cached = again["usage"]["prompt_tokens_details"]
        assert cached["cached_tokens"] == 32 and cached["cached_tokens_by_tier"] == {"pool": 0, tier: 32}
        events, begin = [], 0
        while page := server.http.get("/v1/cache/events", params={"after": begin}).json()["data"]:
            events += page
            begin = page[-1]["number"] + 1
        mine = [event["kind"] for event in events if event["medium"] == tier and event["token_ids"] == prompt[:8]]
        assert mine == ["stored"], "the tier has kept it since"
        lost = [event["kind"] for event in events if event["medium"] == "device"]
        assert {"stored", "removed"} <= set(lost)
        server.complete(prompt=prompt[::-1], max_tokens=1)
        metrics = server.http.get("/metrics").text
        (hits,) = re.findall(rf"^jpaged[:_]{tier}_cache_hits_total\S* (\S+)", metrics, re.M)
        assert float(hits) == 32
        missed = dict(
            re.findall(r'^jpaged[:_]prefix_cache_missed_tokens_total\{.*reason="(\w+)".*\} (\S+)', metrics, re.M)
        )
        assert float(missed["never_seen"]) >= 32 + 33
    finally:
        server.stop()
        llm.close()

"""Changes of cached blocks over HTTP."""

import pytest

PATH = "/v1/cache/events"


def test_events_are_listed_from_a_number_on(tiny_llm, serve):
    engine = tiny_llm.control.engine
    engine.log_cache_events(1000)
    server = serve()
    try:
        begin = server.http.get(PATH).json()["next"]
        server.complete(prompt=[*range(40, 60)])
        found = server.http.get(PATH, params={"after": begin, "limit": 1}).json()
        (event,) = found["data"]
        assert event["kind"] == "stored" and event["medium"] == "device" and event["group"] == 0
        assert event["token_ids"] == [*range(40, 48)] and event["number"] == begin and not found["lost"]
        rest = server.http.get(PATH, params={"after": found["next"]}).json()["data"]
        assert rest[0]["parent"] == event["digest"] and server.http.get(PATH, params={"after": 10**9}).json()["lost"]
        assert server.http.get(PATH, params={"after": -1}).status_code == 400
    finally:
        for replica in engine.replicas:
            replica.memory.parts.cache.watch = None
        engine.event_log = None


def test_without_the_setting_there_are_none(server):
    answer = server.http.get(PATH)
    assert answer.status_code == 404 and "kv_cache_events" in answer.json()["error"]["message"]


@pytest.mark.parametrize("after, most", [(-1, 1), (0, 0)])
def test_numbers_out_of_range_are_refused(tiny_llm, after, most):
    tiny_llm.control.engine.log_cache_events(10)
    with pytest.raises(ValueError, match=r"after=|most="):
        tiny_llm.cache_events(after, most)
    assert tiny_llm.cache_events().next >= 0
    tiny_llm.control.engine.replicas[0].memory.parts.cache.watch = None
    tiny_llm.control.engine.event_log = None

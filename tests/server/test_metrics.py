"""What the server measures of requests, and the dashboard that draws it."""

import asyncio
import json
import re
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

from live_server import until

from jpaged import CompletionOutput, RequestOutput
from jpaged.engine.stats import Counters, EngineStats, metrics_of
from jpaged.memory import BlockCounts, TierStats
from jpaged.outputs import RequestMetrics
from jpaged.server.access import Key
from jpaged.server.metrics import RequestTimes, ServerMetrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
PATH = "/v1/completions"
BODY = {"prompt": "the cab", "max_tokens": 100, "ignore_eos": True, "seed": 1}


def expressions():
    board = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_one_of_the_servers(server):
    server.chunks(PATH, BODY | {"max_tokens": 3})
    text = server.http.get("/metrics").text
    there = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    named = {name for each in expressions() for name in re.findall(r"jpaged:\w+", each)}
    assert len(named) > 20 and named <= there, named - there
    labels = {name for each in expressions() for by in re.findall(r"by \(([^)]*)\)", each) for name in by.split(", ")}
    assert labels == {"le", "group", "state", "finished_reason", "way"}
    assert all(f'{label}="' in text for label in labels)


def test_the_help_of_every_metric_says_what_is_measured():
    (counts,) = (BlockCounts("full", 1, 2, 3),)
    disk = TierStats(**{field.name: 1 for field in fields(TierStats)})
    known = {field.name: 1 for field in fields(EngineStats)}
    stats = EngineStats(
        **known | {"blocks": (counts,), "disk": disk, "finished": {"stop": 1}, "step_times": Counters().step_times}
    )
    engine = SimpleNamespace(get_metrics=lambda: metrics_of(stats))
    text = ServerMetrics(engine, "m").text().decode()
    helps = dict(re.findall(r"# HELP jpaged:(\w+) (.*)", text))
    assert len(helps) > 30 and all(
        (text.endswith(".") and text[0].isupper()) or text[0] == "1" for text in helps.values()
    )
    assert helps["kv_cache_usage_perc"].endswith("from 0 to 1.")


def test_the_first_tokens_of_a_stream_share_the_time_since_the_first_however_many_come_at_once():
    def came(*tokens):
        took = RequestMetrics(0.0, 0.0, time.monotonic() - 8.0)
        outputs = [CompletionOutput(i, "", list(range(number)), 0.0, None) for i, number in enumerate(tokens)]
        return RequestOutput("r", "a", [1], outputs, finished=False, metrics=took)

    times = RequestTimes()
    times.count(came(3, 1))
    assert times.shared == {0: 2} and 8.0 <= times.gap < 60.0
    times.count(came(0, 0))
    assert times.shared == {}
    times.count(came(1, 2))
    assert times.shared == {0: 1, 1: 2} and times.gap < 8.0
    assert times.num_tokens == {0: 4, 1: 3}


def test_the_wait_for_a_keys_turn_is_part_of_the_times_that_are_told(serve, pace):
    """What waits at the server is not with the engine yet, and would look as if it had come just now."""
    server = serve(keys=(Key.of("one", "alice"), Key.of("two", "bob"), Key.of("root", "admin", admin=True)))
    places = server.serving.queue._free
    headers = {"Authorization": "Bearer one"}
    pace.left = 0

    async def all_at_once():
        import httpx

        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
            asked = [asyncio.create_task(client.post(PATH, json=BODY | {"max_tokens": 1})) for _ in range(places + 1)]
            while server.serving.queue.num_waiting < 1:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            pace.go_on()
            return [(await one).status_code for one in asked]

    assert asyncio.run(all_at_once()) == [200] * (places + 1)
    until(lambda: server.serving.num_active == 0)
    text = server.http.get("/metrics", headers={"Authorization": "Bearer root"}).text
    for name in ("request_queue_time_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds"):
        (total,) = re.findall(rf'jpaged:{name}_sum{{model_name="tiny"}} (\S+)', text)
        assert float(total) >= 0.5 * (places + 1), "the one that waited for a place waited as long as the others"

"""Tells from JAX's profiler how busy a device was."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path


def busy_share(folder: Path) -> float:
    """Return the share of the time between a device's first and last event in which it ran something.

    Args:
        folder: where ``jax.profiler.trace(folder, create_perfetto_trace=True)`` wrote.

    Raises:
        ValueError: when the trace holds no event of a device.
    """
    traces = sorted(folder.rglob("perfetto_trace.json.gz"))
    if not traces:
        raise ValueError(f"no perfetto_trace.json.gz under {folder}")
    with gzip.open(traces[-1], "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:" in event.get("args", {}).get("name", "")
    }
    spans = [
        (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
        for event in events
        if event.get("ph") == "X" and event.get("pid") in devices
    ]
    if not spans:
        raise ValueError(f"{traces[-1].name} holds no event of a device")
    return covered(spans) / (max(end for _, end in spans) - min(start for start, _ in spans))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of some intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total

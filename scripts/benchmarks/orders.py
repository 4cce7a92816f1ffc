"""Compares this project's memory with itself on the loads of `against_vllm`: orders of placement and of eviction, and
host memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jpaged
from scripts.benchmarks.against_vllm import LOADS, POOLS, Served, by_jpaged
from scripts.benchmarks.shapes import ModelShape, shape_named
from scripts.benchmarks.workloads import Ask
from scripts.cases import Row

WINDOWED = ["Gemma-3-27B", "Gemma-4-31B", "gpt-oss-20b"]
KINDS = ["conversations", "articles", "agents"]
BLOCK_SIZES = [16, 32, 128]
ROOM = str(Path(jpaged.__file__).parent)
LARGE_BLOCK, POOL_OF_LARGE = 128, 4
"""Tokens of a block from which on a pool has so many times the bytes: its large pages are so much larger."""


def placement(
    models: list[str] = WINDOWED,
    block_sizes: list[int] = BLOCK_SIZES,
    loads: list[str] = KINDS,
    requests: int = 48,
    seeds: int = 3,
) -> Iterator[Row]:
    """Steps with blocks placed by what a large page strands, and with packed ones, which open a page last.

    "times" is the first over the second. Both are orders of the allocator; the second is that of requests that hardly
    fit.
    """
    for model in models:
        for size in block_sizes:
            shape = shape_named(model, POOLS[model] * (POOL_OF_LARGE if size >= LARGE_BLOCK else 1))
            for load in loads:
                drawn = [LOADS[load](requests, seed) for seed in range(seeds)]
                steps, packed = (
                    sum(len(by_jpaged(shape, asks, block_size=size, packed=packs).running) for asks in drawn)
                    for packs in (False, True)
                )
                row: Row = {"model": model, "GiB": shape.pool_gib, "block size": size, "load": load}
                yield row | {"steps": steps, "packed": packed, "times": steps / packed}


def eviction_time(
    models: list[str] | None = None, loads: list[str] = KINDS, requests: int = 48, seeds: int = 3
) -> Iterator[Row]:
    """Steps, hits and processor time a step of `predicted` eviction, over those of `aligned`.

    Both serve each seed in turn; the time is the median over seeds of a seed's median step.
    """
    for model in models or POOLS:
        shape = shape_named(model, POOLS[model])
        for load in loads:
            served: dict[str, list[Served]] = {"aligned": [], "predicted": []}
            for seed in range(seeds):
                asks = LOADS[load](requests, seed)
                for order, runs in served.items():
                    runs.append(by_jpaged(shape, asks, prefix_eviction=order))
            steps, found, times = ([figure(served[order]) for order in served] for figure in (_steps, _found, _time))
            yield {
                "model": model,
                "load": load,
                "steps": steps[1] / steps[0],
                "found, points": 100 * (found[1] - found[0]),
                "aligned, us": 1e6 * times[0],
                "time a step": times[1] / times[0],
            }


def tier_calls(
    models: list[str] | None = None, loads: list[str] = KINDS, requests: int = 48, seeds: int = 3
) -> Iterator[Row]:
    """Python functions of this project that a step calls with host memory of four times the pool, over those without.

    Calls are equal on every machine, however loaded; times are not.
    """
    for model in models or POOLS:
        shape = shape_named(model, POOLS[model])
        for load in loads:
            drawn = [LOADS[load](requests, seed) for seed in range(seeds)]
            plain, ram = ([_counted(shape, asks, ram=times) for asks in drawn] for times in (0.0, 4.0))
            calls = [sum(number for _, number in runs) / _steps([one for one, _ in runs]) for runs in (plain, ram)]
            yield {"model": model, "load": load, "calls": calls[0], "with RAM": calls[1], "times": calls[1] / calls[0]}


def _counted(shape: ModelShape, asks: Sequence[Ask], **options: Any) -> tuple[Served, int]:
    """Serve requests; return also how many functions of jpaged were called."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(ROOM)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        served = by_jpaged(shape, asks, **options)
    finally:
        sys.setprofile(before)
    return served, count


def _steps(served: list[Served]) -> int:
    return sum(len(one.running) for one in served)


def _found(served: list[Served]) -> float:
    return sum(one.found for one in served) / max(1, sum(one.asked for one in served))


def _time(served: list[Served]) -> float:
    return median(one.seconds for one in served)

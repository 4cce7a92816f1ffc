"""Simulates models whose layers differ (Jenga paper): waste, throughput by way to share a pool, eviction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpaged.bench.load import draw_lengths
from scripts.benchmarks.baselines import BlockMemory, GcdPool, NaivePool, SmallScheduler, SplitPool
from scripts.benchmarks.shapes import JENGA, SHAPES, ModelShape, shape_named
from scripts.benchmarks.simulate import RECENT_ENGINE, Machine, PagedServer, Server, simulate
from scripts.benchmarks.workloads import (
    Ask,
    Pairs,
    arrivals,
    at_once,
    draw_articles,
    draw_conversations,
    pairs_of,
)
from scripts.cases import Rows

BUDGET, MAX_NUM_SEQS = 2560, 256
SYSTEMS = ("jpaged", "largest page", "static split", "GCD page", "naive Jenga")
"""jpaged's layer groups; one page size in which every layer keeps every token (the paper's vLLM); a fixed share of the
pool for each group; pages of the greatest common divisor; large pages without request-aware placement."""

PAPER_WASTE = {
    "Llama-3.2-11B-Vision": (43, 0.796),
    "Gemma-2-9B": (8192, 0.25),
    "Ministral-8B": (131072, 0.5625),
    "Gemma-3-27B": (8192, 0.736),
}
"""Text tokens, and the share that one page size wastes (Jenga)."""
OTHER_LENGTHS = {"Jamba-1.5-Mini": 8192, "Llama-3.1-8B + 1B draft": 8192, "Gemma-3-27B + images": 2048 + 43}
PAPER_RATIO = {
    "Llama-3.2-11B-Vision": 1.71,
    "Gemma-3-27B": 1.39,
    "Ministral-8B": 1.50,
    "Llama-4-Scout (text)": 1.73,
    "Jamba-1.5-Mini": 1.39,
    "character.ai-like": 1.62,
    "PyramidKV on Llama-3.1-8B": 1.50,
    "Llama-3.1-8B + 1B draft": 1.58,
    "Llama-3.1-8B": 1.00,
}
"""Requests/s of jpaged's groups over those of the largest page, as the Jenga paper measured them on H100."""


def paged(shape: ModelShape, *, largest: bool = False, **options: Any) -> PagedServer:
    """Return jpaged's server of a shape: over its layer groups, or over pages of one size."""
    pool = int(shape.pool_gib * 2**30)
    options = {"budget": BUDGET, "max_num_seqs": MAX_NUM_SEQS, **options}
    if largest:
        shift = shape.encoder_tokens
        return PagedServer(shape.largest_page_groups(), pool, name="largest page", shift=shift, **options)
    return PagedServer(shape.groups(), pool, image_tokens=shape.image_tokens, **options)


def build(name: str, shape: ModelShape, mean_length: int) -> Server:
    """Build one of `SYSTEMS`.

    Args:
        mean_length: tokens of a mean request, by which a static split divides the pool.

    Raises:
        ValueError: unknown name.
    """
    if name in ("jpaged", "largest page"):
        return paged(shape, largest=name == "largest page")
    groups, pool = shape.groups(), int(shape.pool_gib * 2**30)
    if name == "static split":
        needs = [
            spec.real_bytes
            * sum(
                len(run)
                for run in spec.policy.for_request(shape.image_tokens).active_blocks(mean_length, spec.block_size)
            )
            for spec in groups
        ]
        shares = [pool * need // sum(needs) for need in needs]
        memory = BlockMemory(groups, lambda: SplitPool(groups, shares), shape.image_tokens)
    elif name == "GCD page":
        memory = BlockMemory(groups, lambda: GcdPool(groups, pool), shape.image_tokens)
    elif name == "naive Jenga":
        memory = BlockMemory(groups, lambda: NaivePool(groups, pool), shape.image_tokens)
    else:
        raise ValueError(f"name={name!r} is not one of {', '.join(SYSTEMS)}")
    return SmallScheduler(name, memory, max_num_seqs=MAX_NUM_SEQS, budget=BUDGET)


def waste(models: list[str] | None = None) -> Rows:
    """Share of one sequence's memory that is never read: one page size against jpaged's groups (Jenga, section 3)."""
    rows = []
    for shape in SHAPES:
        length, paper = PAPER_WASTE.get(shape.name, (OTHER_LENGTHS.get(shape.name, 0), None))
        if not length or (models and shape.name not in models):
            continue
        needed = shape.needed_bytes(length)
        row = {"model": shape.name, "tokens": length}
        for name, largest in (("largest page", True), ("jpaged", False)):
            row[name] = 1 - needed / _held_by_one(shape, length, largest)
        rows.append(row | {"largest page in the paper": paper})
    return rows


def _held_by_one(shape: ModelShape, length: int, largest: bool) -> int:
    """Return the bytes that a single sequence of `length` tokens holds."""
    server = paged(shape, largest=largest)
    if not server.add(0, Ask(0.0, length, 2)):
        raise ValueError(f"{shape.name}: {length} tokens do not fit {shape.pool_gib} GiB")
    while not server.lengths or server.lengths[0] < length:
        server.step()
    return server.held_bytes()


def hybrids(
    models: list[str] | None = None,
    requests: int = 80,
    mean_prompt: int = 8000,
    mean_output: int = 300,
    seed: int = 0,
    trace: Path | None = None,
) -> Rows:
    """Requests/s and mean batch of decodes, all requests at once (Jenga, figure 14), for five ways to share a pool.

    Lengths are those of --trace (CSV with prompt_len, output_len), else lognormal. Requests that one of the systems
    could never hold are left out for all.
    """
    pairs: Pairs = pairs_of(trace) if trace else _drawn(mean_prompt, mean_output, requests, seed)
    rows = []
    for served in JENGA:
        shape = served.shape
        if models and shape.name not in models:
            continue
        asks = arrivals(_suiting(shape, pairs), math.inf, requests, seed)
        mean = sum(ask.prompt + ask.output for ask in asks) // len(asks)
        asks = [ask for ask in asks if all(build(name, shape, mean).add(0, ask) for name in SYSTEMS)]
        found = {}
        for name in SYSTEMS:
            server = build(name, shape, mean)
            out = simulate(server, Machine(served, RECENT_ENGINE), asks)
            found[name] = len(out.latencies) / out.seconds
            row = {"model": shape.name, "system": name, "requests": len(asks), "requests/s": found[name]}
            row |= {"batch": out.decode_batch, "preemptions": server.preemptions}
            rows.append(row)
        rows[-len(SYSTEMS)]["jpaged / largest page"] = found["jpaged"] / found["largest page"]
        rows[-len(SYSTEMS)]["in the paper"] = PAPER_RATIO[shape.name]
    return rows


def _drawn(mean_prompt: int, mean_output: int, number: int, seed: int) -> Pairs:
    return tuple((d.prompt, d.output) for d in draw_lengths(mean_prompt, mean_output, number, seed))


def _suiting(shape: ModelShape, pairs: Pairs) -> Pairs:
    """Return lengths cut to the model's; questions about images have 43 tokens, as in the Jenga paper."""
    most = shape.max_len - 4096
    if shape.image_tokens:
        asked = 43 + shape.image_tokens - shape.encoder_tokens
        return tuple((asked, min(output, 4096)) for _, output in pairs)
    return tuple((min(prompt, most), min(output, 4096)) for prompt, output in pairs)


def eviction(requests: int = 200, articles: int = 12, seed: int = 0, models: list[str] | None = None) -> Rows:
    """Prompt tokens found in the prefix cache, by `prefix_eviction` (Jenga, section 5): conversations and articles.

    Pools are so small that the cache has to choose. "largest page" is one page size for all layers.
    """
    pools = {"Llama-3.1-8B": 12.0, "Gemma-3-27B": 24.0, "Jamba-1.5-Mini": 8.0}
    loads = {
        "conversations": at_once(draw_conversations(requests, seed)),
        f"{articles} articles": at_once(draw_articles(articles, requests, seed)),
    }
    rows = []
    for model, gib in pools.items():
        if models and model not in models:
            continue
        for load, asks in loads.items():
            for largest in (False, True) if len(shape_named(model).layers) > 1 else (False,):
                for mode in ("aligned",) if largest else ("lru", "aligned", "predicted"):
                    rows.append(_hits(shape_named(model, gib), load, asks, mode, largest))
    return rows


def _hits(shape: ModelShape, load: str, asks: Sequence[Ask], mode: str, largest: bool) -> dict[str, Any]:
    """Serve requests one after another as memory allows, and return what the cache gave."""
    server = paged(shape, largest=largest, prefix_caching=True, prefix_eviction=mode)
    taken = [key for key, ask in enumerate(asks) if server.add(key, ask)]
    steps = batch = 0
    while server.step() is not None:
        steps, batch = steps + 1, batch + len(server.running)
    row: dict[str, Any] = {"model": shape.name, "load": load, "system": server.name, "prefix_eviction": mode}
    row |= {"requests": len(taken), "tokens found": server.cached / max(1, server.asked)}
    return row | {"batch": batch / max(1, steps), "steps": steps}

"""Runs the experiments that were asked for and keeps what they gave in a file, so that none is run twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jpaged.benchmarks.kept_figures import KeptFigures
from jpaged.benchmarks.memory_traces import read_trace
from jpaged.benchmarks.serving_sim import hybrid_experiments, own_experiments, paged_experiments
from jpaged.benchmarks.serving_sim.curves import LEAST, WARM_UP
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE, RECENT_ENGINE
from jpaged.benchmarks.serving_sim.paged_experiments import Context
from jpaged.benchmarks.serving_sim.workload import (
    DRAWN,
    Workload,
    alpaca,
    chats,
    find,
    long_prompts,
    sharegpt,
    translations,
)

EXPERIMENTS: dict[str, tuple[str, Callable[[Context], Any]]] = {
    "load": ("ShareGPT", paged_experiments.load),
    "several": ("Alpaca", paged_experiments.several),
    "batches": ("ShareGPT", paged_experiments.batches),
    "durations": ("ShareGPT", paged_experiments.durations),
    "savings": ("ShareGPT", paged_experiments.savings),
    "prefixes": ("WMT16", paged_experiments.prefixes),
    "chatbot": ("ShareGPT, several turns", paged_experiments.chatbot),
    "chatbot-costs": ("ShareGPT, several turns", paged_experiments.chatbot_costs),
    "block-sizes": ("ShareGPT", paged_experiments.block_sizes),
    "returning": ("ShareGPT", paged_experiments.returning),
    "hybrid": ("Mooncake", hybrid_experiments.throughput),
    "hybrid-load": ("Mooncake", hybrid_experiments.load),
    "memory": ("Mooncake", hybrid_experiments.memory_over_time),
    "articles": ("ShareGPT", hybrid_experiments.articles),
    "vision": ("ShareGPT", hybrid_experiments.vision),
    "calibration": ("ShareGPT", own_experiments.calibration),
    "host": ("ShareGPT", own_experiments.host_cost),
}
"""Name -> the workload that it cannot do without, and what runs it."""


def workloads(folder: Path | None, count: Callable[[], Callable[[str], int]]) -> dict[str, Workload]:
    """Return the workloads by their public names: ShareGPT's lengths are shipped, the others are a user's files.

    Args:
        count: returns what counts a text's tokens; called only where there are texts.
    """
    known = {"ShareGPT": sharegpt()}
    if folder is None:
        return known
    if find(folder, "alpaca*.jsonl"):
        known["Alpaca"] = alpaca(folder, count())
    if find(folder, "wmt16*.jsonl"):
        known["WMT16"] = translations(folder, count())
    if find(folder, "sharegpt*multiturn*.csv"):
        known["ShareGPT, several turns"] = chats(folder)
    if find(folder, "arxiv*.csv"):
        known["arXiv summarization"] = long_prompts(folder)
    if path := find(folder, "mooncake-conversation*.csv"):
        demands = read_trace(path, 1 << 30)
        known["Mooncake"] = Workload("Mooncake, conversations", tuple((d.prompt, d.output) for d in demands))
    return known


def run(names: Sequence[str], context: Context, kept: Path | None) -> dict[str, Any]:
    """Run experiments by their names in `EXPERIMENTS`.

    Args:
        kept: JSON file of earlier results, which stand, and to which new ones are added as they come; None = no file.

    Raises:
        ValueError: an experiment needs a workload that is not there, or what is kept was run by other settings.
    """
    for name in names:
        needed = EXPERIMENTS[name][0]
        if needed not in context.workloads:
            raise ValueError(f"--only {name} needs the workload {needed}: name its folder by --workloads")
    found = KeptFigures(settings(context), kept)
    for name in names:
        is_short = name == "host" and context.million and not found.parts.get(name, {}).get("million")
        if name not in found.parts or is_short:
            found.add(name, EXPERIMENTS[name][1](context))
    return {name: found.parts[name] for name in names}


def settings(context: Context) -> dict[str, Any]:
    """Return what results depend on: with others they may not stand on one page."""
    workloads = {name: [len(its.pairs), its.mean_prompt, its.mean_output] for name, its in context.workloads.items()}
    engines = {"paper_engine": asdict(PAPER_ENGINE), "recent_engine": asdict(RECENT_ENGINE), "warm_up": WARM_UP}
    drawn = {"seconds": context.seconds, "seed": context.seed, "drawn": DRAWN, "least_requests": LEAST}
    return {**drawn, "workloads": workloads, **engines}

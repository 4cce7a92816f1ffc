"""Runs the experiments that were asked for and keeps what they gave in a file, so that none is run twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jpaged.benchmarks.kept_figures import keep
from jpaged.benchmarks.memory_traces import read_trace
from jpaged.benchmarks.serving_sim import hybrid_experiments, own_experiments, paged_experiments
from jpaged.benchmarks.serving_sim.paged_experiments import Context
from jpaged.benchmarks.serving_sim.workload import (
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
    "savings": ("ShareGPT", paged_experiments.savings),
    "prefixes": ("WMT16", paged_experiments.prefixes),
    "chatbot": ("ShareGPT, several turns", paged_experiments.chatbot),
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
        ValueError: an experiment needs a workload that is not there.
    """
    for name in names:
        needed = EXPERIMENTS[name][0]
        if needed not in context.workloads:
            raise ValueError(f"--only {name} needs the workload {needed}: name its folder by --workloads")
    results: dict[str, Any] = {}
    if kept is not None and kept.exists():
        results = json.loads(kept.read_text(encoding="utf-8"))
    for name in names:
        if name in results:
            continue
        results[name] = EXPERIMENTS[name][1](context)
        if kept is not None:
            keep(kept, results)
    return json.loads(json.dumps({name: results[name] for name in names}))

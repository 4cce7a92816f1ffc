"""Reads the requests of the memory simulation: published ones from a folder, a user's own traces, or drawn ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jpaged.benchmarks.memory_traces import (
    Demand,
    draw_conversations,
    draw_lengths,
    public_name,
    read_trace,
)
from jpaged.benchmarks.serving_sim.workload import Workload, alpaca, count_tokens, find, sharegpt


@dataclass(frozen=True)
class MemoryWorkloads:
    """Holds what is asked of the allocators.

    Attributes:
        chats: requests to OPT-13B, by workload.
        long: requests to models whose layers differ.
        talks: conversations, for prefix caching.
        names: what readers are told of them.
    """

    chats: dict[str, list[Demand]]
    long: list[Demand]
    talks: list[Demand]
    names: list[str]


def read_workloads(
    folder: Path | None,
    traces: Sequence[Path],
    long: Path | None,
    conversations: Path | None,
    num_requests: int,
    seed: int,
    count: Callable[[], Callable[[str], int]] | None = None,
) -> MemoryWorkloads:
    """Return the requests: ShareGPT's, whose lengths are shipped, what `folder` has, and what files are named.

    Args:
        folder: Alpaca's prompts and answers, Azure's and Mooncake's conversations, by how their files' names begin.
        traces: further chats.
        long, conversations: files that go before the folder's; lengths are drawn where there is neither.
        num_requests: requests of a run; there are four times as many chats and half as many long ones.
        count: returns what counts a text's tokens; by default the demo model's tokenizer.

    Raises:
        ValueError: a file has not the columns that it needs.
    """
    chats = {"ShareGPT": _demands(sharegpt(), 4 * num_requests)}
    if folder is not None and find(folder, "alpaca*.jsonl"):
        chats["Alpaca"] = _demands(alpaca(folder, (count or count_tokens)()), 4 * num_requests)
    azure = None if folder is None else find(folder, "azure2023-conv*.csv")
    for path in [*([azure] if azure else []), *traces]:
        chats[public_name(path)] = read_trace(path, 4 * num_requests)
    mooncake = None if folder is None else find(folder, "mooncake-conversation*.csv")
    long, conversations = long or mooncake, conversations or mooncake
    half = num_requests // 2
    far = read_trace(long, half) if long else draw_lengths(8000, 300, half, seed)
    talks = read_trace(conversations, num_requests) if conversations else draw_conversations(num_requests, seed)
    names = [f"{name} (OPT-13B)" for name in chats]
    names.append(f"{public_name(long) if long else 'drawn long prompts'} (models whose layers differ)")
    names.append(f"{public_name(conversations) if conversations else 'drawn conversations'} (prefix caching)")
    return MemoryWorkloads(chats, far, talks, names)


def _demands(workload: Workload, most: int) -> list[Demand]:
    return [Demand(prompt, output) for prompt, output in workload.pairs[:most]]

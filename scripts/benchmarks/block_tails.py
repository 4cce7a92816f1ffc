"""Counts the prompt tokens that prefix hits lose because they end where blocks end."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from pathlib import Path

from jpaged.scheduling.admission import common_prefix
from scripts.benchmarks.against_vllm import LOADS
from scripts.cases import Row

PIECE = re.compile(r"\s?\w{1,6}|\s?[^\w\s]|\s+")
"""Matches what stands for a token of a text: up to six letters with the blank before them, a sign, or blanks."""

BLOCK_SIZES = [16, 128]

Served = tuple[list[int], list[int]]
"""The tokens of a prompt, and of its answer."""


def block_tails(
    loads: list[str] | None = None,
    texts: list[Path] | None = None,
    block_sizes: list[int] = BLOCK_SIZES,
    seeds: int = 3,
) -> Iterator[Row]:
    """Prompt tokens found in an endless cache by hits that end with blocks, and by hits that end anywhere.

    "computed" is the tokens that hits inside blocks would save over those computed without them. --texts are files of
    JSON lines with a "prompt" and perhaps an "output". Sums over the seeds of drawn loads.

    Raises:
        ValueError: an unknown load.
    """
    if unknown := set(loads or ()) - set(LOADS):
        raise ValueError(f"loads={sorted(unknown)} are none of {', '.join(LOADS)}")
    runs: dict[str, list[list[Served]]] = {
        name: [[(list(ask.tokens), [0] * ask.output) for ask in LOADS[name](48, seed)] for seed in range(seeds)]
        for name in (LOADS if loads is None else loads)
    }
    for path in texts or ():
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        pieces: dict[str, int] = {}
        runs[path.stem] = [
            [(_pieces(line["prompt"], pieces), _pieces(line.get("output", ""), pieces)) for line in lines]
        ]
    for name, parts in runs.items():
        shared = [pair for served in parts for pair in shared_tokens(served)]
        for size in block_sizes:
            yield {"load": name, "block size": size} | lost(shared, size)


def shared_tokens(served: Sequence[Served]) -> list[tuple[int, int]]:
    """Return for each prompt its tokens and how many of the first of them an earlier prompt and its answer began with;
    the last token is computed always."""
    earlier: list[list[int]] = []
    found = []
    for prompt, answer in served:
        place = bisect_left(earlier, prompt)  # the longest common prefix is that with a neighbour in their order
        near = earlier[max(0, place - 1) : place + 1]
        found.append((len(prompt), min(len(prompt) - 1, max((common_prefix(one, prompt) for one in near), default=0))))
        insort(earlier, prompt + answer)
    return found


def lost(shared: Sequence[tuple[int, int]], size: int) -> Row:
    """Return the shares of prompt tokens that hits find with blocks of `size` tokens and inside them."""
    asked = sum(length for length, _ in shared)
    anywhere = sum(common for _, common in shared)
    at_blocks = sum(common // size * size for _, common in shared)
    return {
        "at blocks": at_blocks / asked,
        "anywhere": anywhere / asked,
        "computed": (anywhere - at_blocks) / max(1, asked - at_blocks),
    }


def _pieces(text: str, known: dict[str, int]) -> list[int]:
    return [known.setdefault(piece, len(known)) for piece in PIECE.findall(text)]

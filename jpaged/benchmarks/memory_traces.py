"""Makes requests to simulate: lengths and shared prefixes are read from a trace, or drawn."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HASH_BLOCK = 512
"""Prompt tokens that one hash id of a trace stands for."""

INSTRUCTION = 32
"""Tokens that all prompts about images begin with."""


@dataclass(frozen=True)
class Demand:
    """Describes one request, `prompt` and `output` in tokens.

    Attributes:
        hash_ids: what the prompt begins with, in blocks of `HASH_BLOCK`; equal leading ids are equal tokens.
        image: the image that it asks about; the prompt begins as that of all such requests does. None = no image.
    """

    prompt: int
    output: int
    hash_ids: tuple[int, ...] = ()
    image: int | None = None


def read_trace(path: Path, most: int) -> list[Demand]:
    """Return the first `most` requests of a CSV file with columns prompt_len and output_len, and perhaps hash_ids
    (ranges: ``0 14-27``), in which a file of answers' lengths alone (len_reference) counts as prompts of 20 tokens.

    Raises:
        ValueError: the file has no such columns.
    """
    demands: list[Demand] = []
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if len(demands) == most:
                break
            if "prompt_len" in row:
                hash_ids = tuple(_expand(row.get("hash_ids") or ""))
                demands.append(Demand(int(row["prompt_len"]), int(row["output_len"]), hash_ids))
            elif "len_reference" in row:
                demands.append(Demand(20, int(row["len_reference"])))
            else:
                raise ValueError(f"{path} has the columns {', '.join(row)}, not prompt_len and output_len")
    return [d for d in demands if d.prompt and d.output]


def draw_lengths(mean_prompt: float, mean_output: float, number: int, seed: int, sigma: float = 1.0) -> list[Demand]:
    """Draw requests of lognormal lengths."""
    rng = np.random.default_rng(seed)

    def lengths(mean: float) -> list[int]:
        return [max(1, round(x)) for x in rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, number)]

    return [Demand(p, o) for p, o in zip(lengths(mean_prompt), lengths(mean_output), strict=True)]


def draw_conversations(number: int, seed: int, turns: int = 4) -> list[Demand]:
    """Draw prompts of a few thousand tokens that begin with one of eight system prompts and go on as conversations.

    Conversations take turns, twenty at a time, each prompt beginning with the one before it.
    """
    rng = np.random.default_rng(seed)
    demands: list[Demand] = []
    fresh = 1000
    while len(demands) < number:
        talks = [list(range(10 * s, 10 * s + 4)) for s in rng.integers(0, 8, 20)]
        for _ in range(turns):
            for ids in talks:
                grown = int(rng.integers(1, 5))
                ids += range(fresh, fresh + grown)
                fresh += grown
                prompt = len(ids) * HASH_BLOCK - int(rng.integers(0, HASH_BLOCK))
                demands.append(Demand(prompt, int(rng.integers(50, 500)), tuple(ids)))
    return demands[:number]


def draw_articles(articles: int, requests: int, seed: int, mean: float = 12_000, question: int = 64) -> list[Demand]:
    """Draw questions, each about one of some articles of a mean length in tokens, any of which comes next."""
    rng = np.random.default_rng(seed)
    blocks = [max(1, round(d.prompt / HASH_BLOCK)) for d in draw_lengths(mean, 1, articles, seed, sigma=0.3)]
    ids = [tuple(range(1000 * number, 1000 * number + count)) for number, count in enumerate(blocks)]
    chosen = rng.integers(0, articles, requests)
    return [Demand(len(ids[a]) * HASH_BLOCK + question, int(rng.integers(50, 200)), ids[a]) for a in chosen]


def draw_image_questions(images: int, requests: int, seed: int) -> list[Demand]:
    """Draw short questions, each about one of some images, any of which comes next."""
    rng = np.random.default_rng(seed)
    return [
        Demand(INSTRUCTION + int(rng.integers(8, 40)), int(rng.integers(50, 200)), image=int(rng.integers(images)))
        for _ in range(requests)
    ]


PUBLIC_NAMES = {
    "sharegpt8k-multiturn": "ShareGPT, several turns",
    "sharegpt": "ShareGPT, first exchanges",
    "alpaca": "Alpaca, answers",
    "azure2023-conv": "Azure 2023, conversations",
    "azure2023-code": "Azure 2023, code",
    "mooncake-conversation": "Mooncake, conversations",
    "mooncake-synthetic": "Mooncake, synthetic",
    "lmsys-chat": "LMSYS-Chat-1M",
    "arxiv-summarization": "arXiv summarization",
}
"""What the name of a trace's file begins with -> what its workload is known as."""


def public_name(path: Path) -> str:
    """Return the name that readers know a trace's workload by; the file's where it is none of `PUBLIC_NAMES`."""
    return next((name for start, name in PUBLIC_NAMES.items() if path.stem.startswith(start)), path.stem)


def prompt_tokens(demand: Demand, unique: int) -> list[int]:
    """Return the token ids with the trace's sharing; what has no hash id is the request's own, told apart by
    `unique`."""
    tokens = [] if demand.image is None else list(range(-INSTRUCTION, 0))
    for hash_id in demand.hash_ids:
        tokens += range(hash_id * HASH_BLOCK, (hash_id + 1) * HASH_BLOCK)
    missing = demand.prompt - len(tokens)
    own = (1 << 40) + (unique << 20)
    return tokens[: demand.prompt] if missing <= 0 else [*tokens, *range(own, own + missing)]


def _expand(text: str) -> list[int]:
    ids: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return ids

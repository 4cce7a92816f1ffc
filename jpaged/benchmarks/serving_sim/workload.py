"""Makes requests that arrive over time: lengths from published data sets, times from a seeded Poisson process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np

from jpaged.benchmarks.memory_traces import Demand, read_trace

MOST_PROMPT, MOST_TOTAL, LEAST = 1024, 2048, 4
"""Longest prompt, longest request and shortest prompt or output that are kept, as vLLM's own benchmark filters
ShareGPT."""
MOST_ARTICLE = 8192
"""Longest article to summarise."""
DRAWN = "lengths and gaps apart"
"""How a seed becomes requests: results of requests that were drawn otherwise may not stand beside others."""


@dataclass(frozen=True)
class Ask:
    """Describes one request.

    Attributes:
        arrival: seconds.
        prompt, output: tokens; each of several outputs has `output` of them.
        n: outputs or beams.
        beams: whether these are beams.
        tokens: the prompt's tokens where prefixes are shared; () = they are its own.
    """

    arrival: float
    prompt: int
    output: int
    n: int = 1
    beams: bool = False
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Workload:
    """Holds the lengths of a data set, (prompt, output) of each request.

    Attributes:
        name: what readers know it by.
    """

    name: str
    pairs: tuple[tuple[int, int], ...]

    @property
    def mean_output(self) -> float:
        return sum(output for _, output in self.pairs) / len(self.pairs)

    @property
    def mean_prompt(self) -> float:
        return sum(prompt for prompt, _ in self.pairs) / len(self.pairs)

    def arrivals(self, rate: float, number: int, seed: int, *, n: int = 1, beams: bool = False) -> list[Ask]:
        """Draw `number` requests at `rate` a second.

        The same seed draws the same lengths, and the same gaps between arrivals but for the rate, whatever the number:
        more requests begin with those that fewer are, so that a curve over rates has no noise of its own.
        """
        lengths, gaps = (np.random.default_rng(part) for part in np.random.SeedSequence(seed).spawn(2))
        chosen = lengths.integers(0, len(self.pairs), number)
        times = np.cumsum(gaps.exponential(1.0, number)) / rate
        asks = []
        for time, place in zip(times.tolist(), chosen.tolist(), strict=True):
            prompt, output = self.pairs[place]
            asks.append(Ask(time, prompt, output, n, beams))
        return asks


def sharegpt() -> Workload:
    """Return first exchanges of ShareGPT, whose lengths are shipped."""
    path = Path(str(resources.files("jpaged.benchmarks") / "data" / "sharegpt_lengths.csv"))
    return Workload("ShareGPT", _filtered(read_trace(path, 1 << 30)))


def alpaca(folder: Path, count: Callable[[str], int]) -> Workload:
    """Return Alpaca's prompts with their own answers.

    Args:
        count: number of tokens of a text.

    Raises:
        ValueError: the folder has no alpaca*.jsonl with prompt and output.
    """
    path = _needed(folder, "alpaca*.jsonl", "prompt and output")
    rows = _rows(path)
    pairs = [(1 + count(row["prompt"]), count(row["output"])) for row in rows]  # one token begins a sequence
    return Workload("Alpaca", tuple((p, o) for p, o in pairs if p and o and p + o <= MOST_TOTAL))


def chats(folder: Path, most: int = 1024) -> Workload:
    """Return turns of ShareGPT's conversations: the last `most` tokens of all that was said, and as many of the answer.

    Raises:
        ValueError: the folder has no sharegpt*multiturn*.csv.
    """
    path = _needed(folder, "sharegpt*multiturn*.csv", "prompt_len and output_len")
    cut = [(min(d.prompt, most), min(d.output, most)) for d in read_trace(path, 1 << 30)]
    return Workload("ShareGPT, several turns", tuple(cut))


def long_prompts(folder: Path, most: int = MOST_ARTICLE) -> Workload:
    """Return summaries of arXiv articles, with prompts of at most `most` tokens.

    Raises:
        ValueError: the folder has no arxiv*.csv.
    """
    path = _needed(folder, "arxiv*.csv", "prompt_len and output_len")
    return Workload("arXiv summarization", tuple((min(d.prompt, most), d.output) for d in read_trace(path, 1 << 30)))


def translations(folder: Path, count: Callable[[str], int]) -> Workload:
    """Return sentences to translate, with their translations.

    Args:
        count: number of tokens of a text.

    Raises:
        ValueError: the folder has no wmt16*.jsonl of en and de.
    """
    path = _needed(folder, "wmt16*.jsonl", "en and de")
    rows = _rows(path)
    return Workload("WMT16", tuple((count(row["en"]), count(row["de"])) for row in rows))


def find(folder: Path, pattern: str) -> Path | None:
    """Return the first file of a folder that fits a pattern."""
    return next(iter(sorted(folder.glob(pattern))), None)


def _needed(folder: Path, pattern: str, fields: str) -> Path:
    """Return the first file that fits a pattern, or raise ValueError naming it and the fields that it should have."""
    path = find(folder, pattern)
    if path is None:
        raise ValueError(f"--workloads {folder} has no {pattern} of {fields}")
    return path


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _filtered(demands: Sequence[Demand]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (d.prompt, d.output)
        for d in demands
        if d.prompt <= MOST_PROMPT and d.prompt + d.output <= MOST_TOTAL and min(d.prompt, d.output) >= LEAST
    )


def shared(asks: Sequence[Ask], prefix: Sequence[int]) -> list[Ask]:
    """Return the requests behind a prefix that all of them share, each with tokens of its own after it."""
    made = []
    for number, ask in enumerate(asks):
        own = range((1 << 40) + (number << 20), (1 << 40) + (number << 20) + ask.prompt)
        made.append(replace(ask, prompt=len(prefix) + ask.prompt, tokens=(*prefix, *own)))
    return made


def count_tokens() -> Callable[[str], int]:
    """Return what counts a text's tokens, by the demo model's tokenizer."""
    from jpaged.loading.tokenizer import find_tokenizer

    tokenizer = find_tokenizer("smollm2-135m")
    return lambda text: len(tokenizer.encode(text))

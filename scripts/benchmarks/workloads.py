"""Makes requests that arrive over time: lengths from data sets, times from a seeded Poisson process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jpaged.bench.load import HASH_BLOCK, Demand, draw_lengths, read_trace

DATA = Path(__file__).parent / "data"
MOST_PROMPT, MOST_TOTAL, LEAST = 1024, 2048, 4
"""Longest prompt, longest request and shortest prompt or output that are kept, as vLLM filters ShareGPT."""


@dataclass(frozen=True)
class Ask:
    """One request to a simulated server.

    Attributes:
        arrival: seconds.
        prompt, output: tokens; each of several outputs has `output` of them.
        n: outputs or beams.
        beams: whether these are beams.
        tokens: the prompt's tokens where prefixes are shared; () = all are its own.
    """

    arrival: float
    prompt: int
    output: int
    n: int = 1
    beams: bool = False
    tokens: tuple[int, ...] = ()


Pairs = tuple[tuple[int, int], ...]
"""(prompt, output) of each request of a data set."""


def pairs_of(trace: Path | None, most: int = 1 << 30) -> Pairs:
    """Return the lengths of a CSV trace with prompt_len and output_len; without one ShareGPT's, which are here."""
    if trace is not None:
        return tuple((demand.prompt, demand.output) for demand in read_trace(trace, most))
    return tuple(
        (d.prompt, d.output)
        for d in read_trace(DATA / "sharegpt_lengths.csv", most)
        if d.prompt <= MOST_PROMPT and d.prompt + d.output <= MOST_TOTAL and min(d.prompt, d.output) >= LEAST
    )


def chatbot_turns(number: int, longest: int, seed: int, trace: Path | None = None) -> list[tuple[int, int]]:
    """Draw (prompt, output) of turns of conversations whose prompt is all of the conversation so far.

    Lengths are those of a CSV trace, without one ShareGPT's, over `MOST_TOTAL / longest`; prompts and outputs are cut
    to half of `longest` tokens each.
    """
    demands = read_trace(trace or DATA / "sharegpt_turns.csv", 1 << 30)
    chosen = np.random.default_rng(seed).choice(len(demands), number, replace=number > len(demands)).tolist()
    share, most = longest / MOST_TOTAL, longest // 2
    return [
        (
            max(1, min(most, round(share * demands[place].prompt))),
            max(1, min(most, round(share * demands[place].output))),
        )
        for place in chosen
    ]


def arrivals(
    pairs: Pairs, rate: float, number: int, seed: int, *, n: int = 1, beams: bool = False, prefix: int = 0
) -> list[Ask]:
    """Draw requests at a rate a second; an infinite rate has all of them arrive at 0.

    A seed draws the same lengths and, apart from the rate, the same gaps whatever the number: a curve over rates has no
    noise of its own.

    Args:
        prefix: tokens before every prompt, which all requests share.
    """
    lengths, gaps = (np.random.default_rng(part) for part in np.random.SeedSequence(seed).spawn(2))
    chosen = lengths.integers(0, len(pairs), number).tolist()
    times = (np.cumsum(gaps.exponential(1.0, number)) / rate).tolist()
    asks = [Ask(time, *pairs[place], n, beams) for time, place in zip(times, chosen, strict=True)]
    if not prefix:
        return asks
    return [
        replace(ask, prompt=prefix + ask.prompt, tokens=(*range(prefix), *own_tokens(number, ask.prompt)))
        for number, ask in enumerate(asks)
    ]


def at_once(demands: Sequence[Demand]) -> list[Ask]:
    """Return requests that are all there from the start, with the prefixes that their hash ids share."""
    asks = []
    for number, demand in enumerate(demands):
        tokens = [t for h in demand.hash_ids for t in range(h * HASH_BLOCK, (h + 1) * HASH_BLOCK)][: demand.prompt]
        tokens += own_tokens(number, demand.prompt - len(tokens))
        asks.append(Ask(0.0, demand.prompt, demand.output, tokens=tuple(tokens)))
    return asks


def own_tokens(number: int, count: int) -> range:
    """Return token ids that no other request has."""
    start = (1 << 40) + (number << 20)
    return range(start, start + count)


def draw_conversations(number: int, seed: int, turns: int = 4) -> list[Demand]:
    """Draw conversations that begin with one of eight system prompts and take turns, twenty at a time."""
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


def draw_articles(articles: int, requests: int, seed: int, mean: float = 12_000) -> list[Demand]:
    """Draw questions of 64 tokens, each about one of some articles, any of which comes next."""
    rng = np.random.default_rng(seed)
    blocks = [max(1, math.ceil(d.prompt / HASH_BLOCK)) for d in draw_lengths(mean, 1, articles, seed, sigma=0.3)]
    ids = [tuple(range(1000 * number, 1000 * number + count)) for number, count in enumerate(blocks)]
    chosen = rng.integers(0, articles, requests)
    return [Demand(len(ids[a]) * HASH_BLOCK + 64, int(rng.integers(50, 200)), ids[a]) for a in chosen]

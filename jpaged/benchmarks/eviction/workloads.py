"""Makes requests that share prefixes as those of services do: conversations, agents, documents, examples, nothing."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jpaged.benchmarks.memory_traces import draw_articles, prompt_tokens, read_trace
from jpaged.benchmarks.prompts import questions
from jpaged.benchmarks.serving_sim.workload import Ask, find, sharegpt
from jpaged.memory.hash_chain import HashChain

Encode = Callable[[str], list[int]]

TURNS, THINKING, TOKEN_SECONDS = 4, 30.0, 0.02
"""Mean turns of a conversation, mean seconds between an answer and the next question, seconds of an answer's token."""

ARTICLES, SHOTS, DOCUMENTS = 24, 8, 5
"""Articles that are asked about, examples before a question, documents that are found for one."""

LONG_BLOCK = 64
"""Block size of workloads whose prompts have many thousand tokens, so that a run takes seconds."""

JOBS_APART = 30.0
"""Seconds between the rounds of a job of agents."""


@dataclass(frozen=True)
class SharedWorkload:
    """Holds requests that arrive over time.

    Attributes:
        name: what readers know it by.
        kind: what is shared.
        asks: the requests in order of arrival.
        block_size: tokens of a block.
    """

    name: str
    kind: str
    asks: tuple[Ask, ...]
    block_size: int = 16

    def slower(self, factor: float) -> SharedWorkload:
        """Return the same requests, `factor` times as far apart."""
        return replace(self, asks=tuple(replace(ask, arrival=factor * ask.arrival) for ask in self.asks))

    def sizes(self) -> tuple[int, int, int]:
        """Return (prompt tokens in whole blocks that an earlier request had computed, or was given, with all before
        them; different tokens in whole blocks; tokens of the longest request)."""
        seen: set[bytes] = set()
        shared = 0
        for ask in self.asks:
            chain = HashChain(self.block_size)
            tokens = [*ask.tokens, *[0] * ask.output]
            chain.extend(tokens, len(tokens) // self.block_size)
            digests = [link.digest for link in chain.links]
            inside = digests[: (ask.prompt - 1) // self.block_size]
            shared += sum(1 for _ in itertools.takewhile(seen.__contains__, inside))
            seen.update(digests)
        longest = max(ask.prompt + ask.output for ask in self.asks)
        return shared * self.block_size, len(seen) * self.block_size, longest


def workloads(folder: Path | None, encode: Encode, number: int, seed: int) -> list[SharedWorkload]:
    """Return the workloads: those made of what is shipped, and those that a folder has files for.

    Args:
        folder: mooncake-conversation*.csv (arrival_s, prompt_len, output_len, hash_ids), metagpt*.jsonl (round, system,
            prompt, output), rag-nq*.jsonl (question, answers, text), mmlu*.jsonl (prefix, questions) and alpaca*.jsonl
            (prompt, output).
        encode: turns a text into token ids.
        number: most requests of a workload.
    """
    found = [conversations(number, seed), articles(number // 2, seed), few_shot(encode, number, seed)]
    makers: list[tuple[str, Callable[[Path], SharedWorkload]]] = [
        ("mooncake-conversation*.csv", lambda path: mooncake(path, number)),
        ("metagpt*.jsonl", lambda path: agents(_rows(path), encode, number, seed)),
        ("rag-nq*.jsonl", lambda path: retrieval(_rows(path), encode, number, seed)),
        ("mmlu*.jsonl", lambda path: subjects(_rows(path), encode, number, seed)),
        ("alpaca*.jsonl", lambda path: instructions(_rows(path), encode, number, seed)),
    ]
    for pattern, make in makers:
        path = None if folder is None else find(folder, pattern)
        if path is not None:
            found.append(make(path))
    short = [workload for workload in found if workload.block_size != LONG_BLOCK]
    return [*found, mixture(short, number)]


def conversations(number: int, seed: int, rate: float = 4.0) -> SharedWorkload:
    """Draw conversations whose turns have the lengths of ShareGPT's exchanges; each prompt is all that was said."""
    rng = np.random.default_rng(seed)
    pairs, talks = sharegpt().pairs, 0
    asks: list[Ask] = []
    starts = _arrivals(rate / TURNS, number, rng)
    while len(asks) < number:
        clock = starts[talks]
        said: list[int] = []
        for turn in range(int(rng.geometric(1 / TURNS))):
            prompt, output = pairs[int(rng.integers(len(pairs)))]
            own = (1 << 40) + ((talks << 24) + (turn << 16))
            said = [*said, *range(own, own + prompt)]
            asks.append(_ask(clock, said, output))
            said = [*said, *[0] * output]  # what the simulation generates
            clock += output * TOKEN_SECONDS + float(rng.exponential(THINKING))
        talks += 1
    return SharedWorkload("ShareGPT, several turns", "conversations", _ordered(asks)[:number])


def mooncake(path: Path, number: int) -> SharedWorkload:
    """Return a service's conversations at their own times.

    Raises:
        ValueError: the file lacks a column.
    """
    with path.open(encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := {"arrival_s", "prompt_len", "output_len", "hash_ids"}.difference(reader.fieldnames or ()):
            there = ", ".join(reader.fieldnames or ())
            raise ValueError(f"{path} has the columns {there}, not {', '.join(sorted(missing))}")
        times = [float(row["arrival_s"]) for row in reader if int(row["prompt_len"]) and int(row["output_len"])]
    demands = zip(times, read_trace(path, 1 << 30), strict=True)
    asks = [
        _ask(time, prompt_tokens(demand, place), demand.output)
        for place, (time, demand) in enumerate(itertools.islice(demands, number))
    ]
    return SharedWorkload("Mooncake, conversations", "conversations", tuple(asks), LONG_BLOCK)


def agents(rows: Sequence[dict[str, str]], encode: Encode, number: int, seed: int, rate: float = 0.1) -> SharedWorkload:
    """Repeat a job of several agents: those of a round are asked at once and share its context, all jobs the roles."""
    rng = np.random.default_rng(seed)
    calls = [(int(r["round"]), encode(r["system"]), encode(r["prompt"]), len(encode(r["output"]))) for r in rows]
    asks = []
    for job, start in enumerate(_arrivals(rate, -(-number // len(calls)), rng)):
        for turn, role, context, output in calls:
            tokens = [*role, *(token + ((job + 1) << 32) for token in context)]
            asks.append(_ask(start + (turn - 1) * JOBS_APART, tokens, output))
    return SharedWorkload("MetaGPT", "agents of a job", _ordered(asks)[:number])


def retrieval(rows: Sequence[dict[str, str]], encode: Encode, number: int, seed: int) -> SharedWorkload:
    """Draw questions about documents, some of them asked for often (Zipf), each behind what a search finds: its own
    document first, then others by how often they are asked for."""
    rng = np.random.default_rng(seed)
    texts = [encode(f"\n\nDocument (Title: {row.get('title', '')}) {row['text']}") for row in rows]
    head = encode("Write a short answer to the question, using only the search results below.")
    weights = 1 / np.arange(1, len(rows) + 1)
    asks = []
    for time in _arrivals(10.0, number, rng):
        chosen = rng.choice(len(rows), DOCUMENTS, replace=False, p=weights / weights.sum()).tolist()
        own, others = chosen[0], sorted(chosen[1:])
        question = encode(f"\n\nQuestion: {rows[own]['question']}\nAnswer:")
        tokens = [*head, *texts[own], *(token for place in others for token in texts[place]), *question]
        asks.append(_ask(time, tokens, max(1, len(encode(rows[own]["answers"][0])))))
    return SharedWorkload("NQ-Open", "documents that were found", tuple(asks))


def few_shot(encode: Encode, number: int, seed: int) -> SharedWorkload:
    """Return GSM8K's questions, which are shipped, behind the same examples."""
    pairs = [(encode(f"Question: {q}\nAnswer:"), encode(f" {a}\n\n")) for q, a in questions()]
    prefix = [token for question, answer in pairs[:SHOTS] for token in (*question, *answer)]
    asked = pairs[SHOTS : SHOTS + number]
    times = _arrivals(10.0, len(asked), np.random.default_rng(seed))
    asks = [_ask(time, [*prefix, *q], len(a)) for time, (q, a) in zip(times, asked, strict=True)]
    return SharedWorkload(f"GSM8K, {SHOTS} shots", "examples", tuple(asks))


def subjects(rows: Sequence[dict[str, str]], encode: Encode, number: int, seed: int) -> SharedWorkload:
    """Return MMLU's questions in any order, each behind its subject's five examples."""
    rng = np.random.default_rng(seed)
    asked = [(encode(row["prefix"]), encode(question["q"])) for row in rows for question in _questions(row)]
    order = rng.permutation(len(asked))[:number].tolist()
    times = _arrivals(10.0, len(order), rng)
    asks = [_ask(time, [*asked[place][0], *asked[place][1]], 1) for time, place in zip(times, order, strict=True)]
    return SharedWorkload("MMLU, 5 shots", "examples, by subject", tuple(asks))


def instructions(rows: Sequence[dict[str, str]], encode: Encode, number: int, seed: int) -> SharedWorkload:
    """Return Alpaca's instructions with their own answers: no two of them begin alike but by chance."""
    times = _arrivals(20.0, min(number, len(rows)), np.random.default_rng(seed))
    asks = [
        _ask(time, encode(row["prompt"]), max(1, len(encode(row["output"]))))
        for time, row in zip(times, rows, strict=False)
        if row["prompt"]
    ]
    return SharedWorkload("Alpaca", "nothing", tuple(asks))


def articles(number: int, seed: int) -> SharedWorkload:
    """Draw questions about long articles, any of which comes next, as in docs/memory.md."""
    times = _arrivals(1.0, number, np.random.default_rng(seed))
    demands = draw_articles(ARTICLES, number, seed)
    asks = [
        _ask(time, prompt_tokens(demand, place), demand.output)
        for place, (time, demand) in enumerate(zip(times, demands, strict=True))
    ]
    return SharedWorkload(f"{ARTICLES} articles (drawn)", "long documents", tuple(asks), LONG_BLOCK)


def mixture(parts: Sequence[SharedWorkload], number: int) -> SharedWorkload:
    """Return all workloads at once, as one service that all sorts of clients use."""
    asks = _ordered(itertools.chain.from_iterable(part.asks for part in parts))
    return SharedWorkload("all of short prompts at once", "of all kinds", asks[: 2 * number])


def _questions(row: dict[str, str]) -> list[dict[str, str]]:
    found = row["questions"]
    assert isinstance(found, list), "questions of a subject are a list"
    return found


def _ask(arrival: float, tokens: Sequence[int], output: int) -> Ask:
    return Ask(arrival, len(tokens), output, tokens=tuple(tokens))


def _arrivals(rate: float, number: int, rng: np.random.Generator) -> list[float]:
    """Draw times of a Poisson process."""
    times: list[float] = (np.cumsum(rng.exponential(1.0, number)) / rate).tolist()
    return times


def _ordered(asks: Iterable[Ask]) -> tuple[Ask, ...]:
    return tuple(sorted(asks, key=lambda ask: ask.arrival))


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

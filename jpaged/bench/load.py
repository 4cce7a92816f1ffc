"""Makes the load of `jpaged bench serve`: prompts, lengths and arrival times."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_COMMON = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them"
)
WORDS = tuple(_COMMON.split())
"""Words that are a token each for most tokenizers, so that a prompt of n of them has about n tokens."""

_TEXT_FIELDS = ("prompt", "question", "text")
_LENGTH_FIELDS = ("max_tokens", "output_len", "output_tokens")


HASH_BLOCK = 512
"""Prompt tokens that one hash id of a trace stands for."""


@dataclass(frozen=True)
class Demand:
    """Describes one request by its lengths, `prompt` and `output` in tokens.

    Attributes:
        hash_ids: ids of the prompt's leading blocks of `HASH_BLOCK` tokens; equal leading ids are equal tokens.
    """

    prompt: int
    output: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ask:
    """One request to send.

    Attributes:
        content: a text, or the messages of a conversation.
        max_tokens: most tokens of the answer.
    """

    content: str | tuple[dict[str, Any], ...]
    max_tokens: int


def read_asks(path: Path, most: int, max_tokens: int) -> list[Ask]:
    """Return the requests of the first `most` lines of a JSONL file.

    A line is an object with ``messages``, with ``turns``, of which the first is sent, or with a text under ``prompt``,
    ``question`` or ``text``; ``max_tokens``, ``output_len`` or ``output_tokens`` may give the answer's length.

    Args:
        max_tokens: length of answers for which the file gives no length.

    Raises:
        ValueError: a line has none of these, or the file has no line; the message names the line.
    """
    asks: list[Ask] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if len(asks) == most:
                break
            if line.strip():
                asks.append(_read_line(line, f"{path}, line {number}", max_tokens))
    if not asks:
        raise ValueError(f"{path} has no line")
    return asks


def _read_line(line: str, where: str, max_tokens: int) -> Ask:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not an object")
    length = next((entry[field] for field in _LENGTH_FIELDS if entry.get(field) is not None), max_tokens)
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"{where}: the answer's length {length!r} must be at least 1")
    if isinstance(messages := entry.get("messages"), list) and messages:
        return Ask(tuple(messages), length)
    if isinstance(turns := entry.get("turns"), list) and turns and isinstance(turns[0], str):
        return Ask(turns[0], length)
    for field in _TEXT_FIELDS:
        if isinstance(entry.get(field), str) and entry[field]:
            return Ask(entry[field], length)
    raise ValueError(f"{where} has none of messages, turns, {', '.join(_TEXT_FIELDS)}: it has {sorted(entry)}")


def read_trace(path: Path, most: int) -> list[Demand]:
    """Return the first `most` requests of a CSV file with columns prompt_len and output_len, and perhaps hash_ids.

    hash_ids may have ranges: ``0 14-27``. If the file has only the lengths of answers (len_reference), prompts get 20
    tokens. Requests with a length of 0 are left out.

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


def _expand(text: str) -> list[int]:
    ids: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return ids


def draw_lengths(mean_prompt: float, mean_output: float, number: int, seed: int, sigma: float = 1.0) -> list[Demand]:
    """Draw requests of lognormal lengths."""
    rng = np.random.default_rng(seed)

    def lengths(mean: float) -> list[int]:
        return [max(1, round(x)) for x in rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, number)]

    return [Demand(p, o) for p, o in zip(lengths(mean_prompt), lengths(mean_output), strict=True)]


def asks_of(demands: Sequence[Demand], seed: int, max_prompt: int | None = None) -> list[Ask]:
    """Return requests of about the lengths of a trace, made of words; equal leading hash ids give equal beginnings.

    Args:
        max_prompt: longer prompts are cut to this number of words.
    """
    asks = []
    for number, demand in enumerate(demands):
        length = demand.prompt if max_prompt is None else min(demand.prompt, max_prompt)
        words: list[str] = []
        for hash_id in demand.hash_ids:
            if len(words) >= length:
                break
            words += random.Random(f"block {hash_id}").choices(WORDS, k=HASH_BLOCK)
        own = random.Random(f"{seed} request {number}")
        words += own.choices(WORDS, k=max(0, length - len(words)))
        asks.append(Ask(" ".join(words[:length]), demand.output))
    return asks


def arrival_times(rate: float, number: int, seed: int, burstiness: float = 1.0) -> list[float]:
    """Return when each of `number` requests is sent, in seconds from the first; they ascend.

    Args:
        rate: requests a second on average; infinite = all at once.
        burstiness: shape of the gamma distribution of the gaps, in (0, 1]. 1 is the exponential one of Poisson
            arrivals; below, the variance of the gaps is 1 / burstiness times as large, and requests come in bursts.

    Raises:
        ValueError: rate is not above 0, or burstiness not in (0, 1].
    """
    if not rate > 0:
        raise ValueError(f"rate={rate} must be above 0 requests a second")
    if not 0 < burstiness <= 1:
        raise ValueError(f"burstiness={burstiness} is not in (0, 1]")
    if math.isinf(rate):
        return [0.0] * number
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), max(0, number - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:number]

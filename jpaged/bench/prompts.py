"""Cuts real text to lengths drawn from a distribution."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """Draws lognormal prompt and output lengths.

    Attributes:
        mean_input, mean_output: mean tokens of a prompt and of an output.
        sigma: standard deviation of the lengths' logarithm.
    """

    num_prompts: int = 64
    mean_input: float = 160
    mean_output: float = 64
    sigma: float = 0.5
    seed: int = 0

    def draw(self, most: int) -> list[tuple[int, int]]:
        """Draw (prompt tokens, output tokens) of each request, together at most `most`."""
        rng = np.random.default_rng(self.seed)

        def lengths(mean: float) -> np.ndarray:
            drawn = rng.lognormal(np.log(mean) - self.sigma**2 / 2, self.sigma, self.num_prompts)
            return np.maximum(1, np.rint(drawn)).astype(int)

        pairs = zip(lengths(self.mean_input), lengths(self.mean_output), strict=True)
        return [(min(int(i), most - 1), min(int(o), most - min(int(i), most - 1))) for i, o in pairs]


QUICK = Lengths(num_prompts=8, mean_input=60, mean_output=24, sigma=0.0)
"""Work of a quick run. All prompts are read in one step and end in one, so that few programs are compiled."""


def questions() -> list[tuple[str, str]]:
    """Return the (question, answer) pairs of GSM8K (MIT licence) that are shipped."""
    lines = (resources.files("jpaged.bench") / "data" / "gsm8k.jsonl").read_text(encoding="utf-8")
    return [(row["question"], row["answer"]) for row in map(json.loads, lines.splitlines())]


def real_prompts(tokenizer: Any, lengths: list[int]) -> list[list[int]]:
    """Return the token ids of real questions and answers (GSM8K, MIT licence), joined and cut to the lengths."""
    texts = itertools.cycle(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in questions())
    prompts = []
    for length in lengths:
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer.encode(next(texts))
        prompts.append(ids[:length])
    return prompts

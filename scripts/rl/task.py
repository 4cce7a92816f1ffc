"""A small arithmetic task: sums of two digits, and what an answer is worth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Problem(NamedTuple):
    """A prompt and the number that answers it."""

    prompt: str
    answer: int


def problems(seed: int, number: int) -> list[Problem]:
    """Return `number` problems, the same for the same seed."""
    pairs = np.random.default_rng(seed).integers(1, 10, (number, 2))
    return [Problem(f"Q: 1 + 1 =\nA: 2\nQ: 3 + 4 =\nA: 7\nQ: {a} + {b} =\nA:", int(a + b)) for a, b in pairs]


def reward(completion: str, answer: int) -> float:
    """Return 1 for the right number in the first place, less the farther a number is off, 0 for none."""
    found = re.match(r"\s*(\d{1,3})", completion)
    if found is None:
        return 0.0
    off = abs(int(found.group(1)) - answer)
    return 1.0 if off == 0 else 0.5 / (1 + off)


def rewards(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[int], **_: object) -> list[float]:
    """Return each completion's reward, as Tunix asks for them."""
    return [reward(text, int(want)) for text, want in zip(completions, answer, strict=True)]

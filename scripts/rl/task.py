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


def problem(a: int, b: int) -> Problem:
    """Return the problem of one sum; its prompt shows two others with their answers, and stops after the sign."""
    return Problem(f"1+1=2\n3+4=7\n{a}+{b}=", a + b)


def problems(seed: int, number: int) -> list[Problem]:
    """Return `number` problems, the same for the same seed."""
    return [problem(int(a), int(b)) for a, b in np.random.default_rng(seed).integers(1, 10, (number, 2))]


def all_problems() -> list[Problem]:
    """Return the 81 problems that there are."""
    return [problem(a, b) for a in range(1, 10) for b in range(1, 10)]


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

"""Repeats what users of vLLM, SGLang and tpu-inference reported of prefix caches and pools, on two schedulers: vLLM's
and this project's.

Each report has the shape of its model, its requests, and a pool of a size at which what it saw would be seen. Bytes of
layers are such that vLLM picks the block size that the report names. tests/scripts/test_public_reports.py demands the
rows of this project, and tests/scheduling/test_public_reports.py the same of small pools, with tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from jpaged.memory import FullAttention, SlidingWindow, StateCheckpoints
from scripts.benchmarks.against_vllm import Served, Vllm, by_jpaged
from scripts.benchmarks.shapes import Layers, ModelShape, shape_named
from scripts.benchmarks.workloads import Ask
from scripts.cases import Row


@dataclass(frozen=True)
class Report:
    """A public report.

    Attributes:
        asks: makes its requests.
        together: most unfinished requests.
        warm: requests before the first that could find something, of this project.
        vllm, jpaged: further settings of each side.
    """

    about: str
    shape: ModelShape
    asks: Callable[[], list[Ask]]
    together: int = 1
    warm: int = 0
    vllm: dict[str, Any] = field(default_factory=dict)
    jpaged: dict[str, Any] = field(default_factory=dict)


def _hybrid(name: str, pool_gib: float, full: tuple[int, int], states: tuple[int, int]) -> ModelShape:
    """Return a hybrid's shape from the number of layers and the bytes of each kind."""
    attention = Layers("full", *full, FullAttention())
    return ModelShape(name, (attention, Layers("state", *states, StateCheckpoints(512))), 131072, pool_gib)


QWEN_4B = _hybrid("Qwen3.5-4B", 8, (8, 2 * 4 * 256 * 2), (24, 4 * 32 * 128 * 128 + 2 * 3 * 8192))
QWEN_27B = _hybrid("Qwen3.5-27B", 6, (16, 2 * 4 * 256 * 2), (48, 4 * 48 * 128 * 128 + 2 * 3 * 10240))
LIGHTNING = _hybrid("Nemotron-3.5-Lightning-30B", 8, (6, 2 * 2 * 128 * 2), (23, 4 * 64 * 64 * 128 + 2 * 3 * 6144))
SUPER = _hybrid("Nemotron-3-Super-120B, FP8", 16, (8, 2 * 2 * 128), (40, 4 * 128 * 64 * 128 + 2 * 3 * 10240))
GEMMA_4 = ModelShape(
    "Gemma-4-31B, FP8",
    (
        Layers("full", 10, 2 * 4 * 512, FullAttention()),
        Layers("window", 50, 2 * 16 * 256, SlidingWindow(1024)),
    ),
    65536,
    8,
)


def _tokens() -> Callable[[int], tuple[int, ...]]:
    """Return a function that makes so many tokens that no other call has made."""
    fresh = count(1000)
    return lambda number: tuple(next(fresh) for _ in range(number))


def _ask(tokens: tuple[int, ...], output: int) -> Ask:
    return Ask(0.0, len(tokens), output, tokens=tokens)


def questions(shared: int, own: tuple[int, int], requests: int, prefixes: int = 1, output: int = 32) -> list[Ask]:
    """Return requests that begin with one of some prefixes, in turn, and go on with so many tokens of their own."""
    rng, take = random.Random(0), _tokens()
    heads = [take(shared) for _ in range(prefixes)]
    return [_ask(heads[i % prefixes] + take(rng.randint(*own)), output) for i in range(requests)]


def sent_again() -> list[Ask]:
    """Return a prompt of 561 tokens, and the same with a short suffix."""
    take = _tokens()
    first = take(561)
    return [_ask(first, 1), _ask(first + take(20), 1), _ask(first + take(20), 1)]


def seats(number: int = 6, prompt: int = 7000, rounds: int = 3) -> list[Ask]:
    """Return sessions with own prompts that are sent in turn, each time with another short suffix."""
    take = _tokens()
    heads = [take(prompt) for _ in range(number)]
    return [_ask(head + take(60), 16) for _ in range(rounds) for head in heads]


def replayed(fill: int = 24, prompt: int = 8448, replays: int = 4) -> list[Ask]:
    """Return more prompts than the pool holds, and the first of them again, each with a short suffix."""
    take = _tokens()
    heads = [take(prompt) for _ in range(fill)]
    return [_ask(head, 1) for head in heads] + [_ask(head + take(60), 1) for head in heads[:replays]]


def one_long() -> list[Ask]:
    """Return one request of 65,536 tokens."""
    return [_ask(_tokens()(65_500), 36)]


REPORTS: dict[str, Report] = {
    "vllm #40696": Report(
        "480 shared tokens, blocks of 528", QWEN_4B, lambda: questions(480, (20, 60), 48), together=16, warm=17
    ),
    "vllm #45238": Report(
        "1,500 shared and 700 own tokens, blocks of 528",
        QWEN_4B,
        lambda: questions(1500, (700, 700), 64, prefixes=8),
        warm=16,
    ),
    "vllm #48401": Report(
        "no prompt as long as a block of 8,320", SUPER, lambda: questions(3000, (100, 200), 24), warm=2
    ),
    "vllm #51250": Report(
        "561 tokens, then these and a short suffix", shape_named("Qwen3.6-35B", 4), sent_again, warm=1
    ),
    "vllm #53749": Report(
        "1,900 shared tokens, blocks of 2,096", LIGHTNING, lambda: questions(1900, (100, 200), 24), warm=2
    ),
    "vllm #48435": Report("six sessions in turn, a window's tails freed", GEMMA_4, seats, warm=6),
    "vllm #54607": Report(
        "240 shared tokens of 480, blocks of 784", QWEN_27B, lambda: questions(240, (200, 280), 32), warm=2
    ),
    "vllm #36463": Report(
        "a hybrid with host memory for its blocks",
        QWEN_27B,
        lambda: questions(2000, (8000, 8000), 12, output=400),
        together=12,
        warm=12,
        vllm={"ram": 4.0},
        jpaged={"preemption_mode": "swap", "swap_space_bytes": 5 << 30},
    ),
    "sglang #39436": Report(
        "a hybrid's evicted prompts from host memory",
        QWEN_27B,
        replayed,
        warm=24,
        vllm={"ram": 4.0},
        jpaged={"ram": 4.0},
    ),
    "tpu-inference #3483": Report("one request of 65,536 tokens in 6 GiB", QWEN_27B, one_long, warm=1),
}
"""By project and number."""


def late_share(report: Report, served: Served) -> float:
    """Return the share of prompt tokens found of those requests that could find something."""
    asked = [ask.prompt for ask in report.asks()][report.warm :]
    return sum(served.hits[report.warm :]) / max(1, sum(asked))


def public_reports(env: Path | None = None, reports: list[str] | None = None) -> Iterator[Row]:
    """What users reported of prefix caches, repeated on vLLM's scheduler and on jpaged's.

    --env is the environment that peer_engines/environment.sh vllm-core makes; without one jpaged runs alone. "found
    then" is the share of prompt tokens found once the prefixes were seen as often as jpaged needs.

    Raises:
        ValueError: an unknown report, or no environment there.
    """
    if unknown := set(reports or ()) - set(REPORTS):
        raise ValueError(f"reports={sorted(unknown)} are none of {', '.join(REPORTS)}")
    vllm = Vllm(env) if env else None
    try:
        for name, report in REPORTS.items():
            if reports is not None and name not in reports:
                continue
            for system in ("jpaged", "vLLM"):
                row: Row = {"report": name, "about": report.about, "GiB": report.shape.pool_gib, "system": system}
                try:
                    if system == "jpaged":
                        served = by_jpaged(report.shape, report.asks(), together=report.together, **report.jpaged)
                    elif vllm is not None:
                        served = vllm.serve(report.shape, report.asks(), together=report.together, **report.vllm)
                    else:
                        continue
                except (ValueError, RuntimeError) as error:
                    yield row | {"refused": str(error)}
                    continue
                yield row | {
                    "steps": len(served.running),
                    "found": served.found / max(1, served.asked),
                    "found then": late_share(report, served),
                    "preemptions": served.preemptions,
                }
    finally:
        if vllm is not None:
            vllm.close()

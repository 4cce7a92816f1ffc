"""Counts the blocks that parallel samples and beams share on texts of a file, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from jpaged.memory import FullAttention, GroupSpec, MemoryManager, PoolLayout
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.scheduling import BeamSearch, Request, ScheduledStep, Scheduler, Sequence
from jpaged.scheduling.top_tokens import TopTokens
from scripts.cases import Rows

PAPER = {("n", 2): 6.09, ("n", 4): 8.53, ("n", 6): 9.79, ("beam", 2): 37.56, ("beam", 4): 53.13, ("beam", 6): 55.16}
MAX_NUM_SEQS = 240
NUM_LOGITS = 1000


@dataclass(frozen=True)
class Lengths:
    """Says how many tokens a prompt has, and each of its outputs."""

    prompt: int
    output: int


def read_lengths(path: Path, characters_per_token: float) -> list[Lengths]:
    """Return the lengths of every line of the file that has an output."""
    texts = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    sizes = [[max(1, round(len(t[key]) / characters_per_token)) for key in ("prompt", "output")] for t in texts]
    return [Lengths(*size) for size in sizes]


def make_request(number: int, lengths: Lengths, kind: str, width: int) -> Request:
    """Return a request of `width` samples or beams."""
    tokens = [number] * lengths.prompt
    beam = BeamSearchParams(width, lengths.output, ignore_eos=True) if kind == "beam" else None
    return Request(
        request_id=number,
        prompt_token_ids=tokens,
        params=SamplingParams(n=width, max_tokens=lengths.output, ignore_eos=True),
        seed=0,
        max_total_tokens=lengths.prompt + lengths.output,
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        sequences=[Sequence(number * width + i, i, list(tokens), lengths.prompt) for i in range(width)],
        beam=None if beam is None else BeamSearch(beam, lengths.output, frozenset()),
    )


class RandomDevice:
    """Draws tokens and most likely tokens without a model."""

    def __init__(self, sharpness: float) -> None:
        self._sharpness = sharpness
        self._random = np.random.default_rng(0)

    def run(self, step: ScheduledStep) -> tuple[list[int], list[float], TopTokens | None]:
        """Return what the engine's runner reads back of a step."""
        rows = len(step.samples)
        tokens = self._random.integers(NUM_LOGITS, size=rows).tolist()
        return tokens, [-1.0] * rows, self._top(rows, step.num_top) if rows and step.num_top else None

    def _top(self, rows: int, top: int) -> TopTokens:
        logits = self._random.normal(scale=self._sharpness, size=(rows, NUM_LOGITS))
        best = np.argsort(-logits, axis=1)[:, :top]
        logprobs = np.take_along_axis(logits, best, axis=1) - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return TopTokens(np.ones(rows, np.int64), best, logprobs)


def saving(requests: Seq[Lengths], kind: str, width: int, block_size: int, sharpness: float) -> float:
    """Return (blocks without sharing - blocks) / blocks without sharing, both summed over all steps."""
    longest = max(lengths.prompt + lengths.output for lengths in requests)
    spec = GroupSpec("full", layer_bytes=1, num_layers=1, block_size=block_size, policy=FullAttention())
    memory = MemoryManager(PoolLayout.plan([spec], 2 * MAX_NUM_SEQS * (longest // block_size + 2)))
    scheduler = Scheduler(memory, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=2048)
    device, numbers = RandomDevice(sharpness), count()
    for lengths in requests:
        scheduler.add(make_request(next(numbers), lengths, kind, width))
    saved = used = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        report = memory.report()
        saved, used = saved + report.blocks_saved, used + report.used
        scheduler.dispatched(step)
        scheduler.update(step, *device.run(step))
    return saved / (saved + used)


def text_savings(
    workload: Path, block_size: int = 16, characters_per_token: float = 4.4, sharpness: float = 4.0
) -> Rows:
    """Blocks that sharing saves (PagedAttention, figure 15, there Alpaca on OPT-13B), averaged over steps.

    The scheduler and the memory manager are the engine's; the device draws tokens at random. WORKLOAD has one JSON
    object a line with the texts `prompt` and `output`. A text has its characters / CHARACTERS_PER_TOKEN tokens, and
    every output of a prompt has the length of the file's. Prefix caching is off: only the outputs of one request share.

    Beams need log-probabilities: those of a softmax over 1,000 logits from a normal distribution with the standard
    deviation SHARPNESS. The beams that go on depend on nothing else, so their figures rest on it.
    """
    requests = read_lengths(workload, characters_per_token)
    prompt, output = (float(np.mean([getattr(lengths, key) for lengths in requests])) for key in ("prompt", "output"))
    return [
        {
            "outputs": f"{width} beams" if kind == "beam" else f"n = {width}",
            "blocks saved": saving(requests, kind, width, block_size, sharpness),
            "paper": paper / 100,
            "requests": len(requests),
            "mean prompt": prompt,
            "mean output": output,
        }
        for (kind, width), paper in PAPER.items()
    ]

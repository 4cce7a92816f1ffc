"""Counts the blocks that sharing saves on Alpaca, beside the PagedAttention paper's figure 15, without a model.

    python scripts/sharing_savings.py alpaca.jsonl [--block-size 16] [--characters-per-token 4.4]

The scheduler and the memory manager are the engine's; a made-up device draws tokens at random. The file has one JSON
object a line with the texts `prompt` and `output`; a text counts as its characters over `--characters-per-token`
tokens, and every output of a prompt is as long as the file's. Prefix caching is off: only a request's own outputs
share.

Beams need log-probabilities. They are made up as those of a softmax over 1,000 logits from a normal distribution whose
standard deviation is `--sharpness`; nothing else decides which beams go on, so the numbers of beams rest on this.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", type=Path, help="a JSON-lines file with `prompt` and `output`")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--characters-per-token", type=float, default=4.4)
    parser.add_argument("--sharpness", type=float, default=4.0, help="standard deviation of the beams' logits")
    arguments = parser.parse_args()
    requests = read_lengths(arguments.workload, arguments.characters_per_token)
    prompt, output = (np.mean([getattr(lengths, key) for lengths in requests]) for key in ("prompt", "output"))
    print(f"{len(requests)} requests, {prompt:.1f} prompt and {output:.1f} output tokens on average")
    print("blocks saved     here   paper (OPT-13B)")
    for (kind, width), paper in PAPER.items():
        here = saving(requests, kind, width, arguments.block_size, arguments.sharpness)
        print(f"{kind:>6} = {width}   {here:8.2%}   {paper:6.2f}%", flush=True)


if __name__ == "__main__":
    main()

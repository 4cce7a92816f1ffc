"""Estimates what an engine serves whose steps take as long as they are simulated to, next to what others published.

`data/tpu_served.csv` has loads that somebody ran on TPUs, all with other engines: a published figure has their host and
their kernels among it.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scripts.cases import Row
from scripts.compiled_code.compilers import need_compiler, schedule_dumps
from scripts.compiled_code.step_models import MODELS
from scripts.compiled_code.step_times import Chunks, Found, StepTimes

FILE = Path(__file__).parent / "data" / "tpu_served.csv"


class Load(NamedTuple):
    """Describes a published run: prompts and answers of one length each, so many requests at once, and its figures.

    Attributes:
        inputs, outputs: tokens of a prompt and of an answer.
        chunk: most tokens of a step.
        tokens_per_second: of the answers.
        step: milliseconds between a request's tokens.
    """

    engine: str
    device: str
    model: str
    inputs: int
    outputs: int
    at_once: int
    requests: int
    chunk: int
    tokens_per_second: float
    step: float
    source: str


def published() -> list[Load]:
    """Return the runs of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [Load(*(kind(row[name]) for name, kind in _COLUMNS.items())) for row in rows]


_COLUMNS: dict[str, Callable[[str], str | int | float]] = {
    "engine": str,
    "device": str,
    "model": str,
    "prompt": int,
    "answer": int,
    "at once": int,
    "requests": int,
    "chunk": int,
    "tokens/s": float,
    "ms a token": float,
    "source": str,
}


def served_loads(kept: Path | None = None) -> Iterator[Row]:
    """Estimated rates of published runs on TPUs next to the published ones: some minutes.

    A run is gone through step by step: prompts in the order of their arrival, in chunks next to the sequences that
    decode, and as many sequences at once as the run had. A step takes as long as `whole-steps` says, or as the host
    takes of which `docs/performance.md` measures a part, if that is longer. A row has:

      published, estimate  tokens of answers a second
      ratio                estimate / published: above 1, the estimate is faster than what was measured
      published ms         between a request's tokens, with the steps that have prompts among them
      estimate ms          the same
      decode ms            of a step in which all sequences decode, halfway through their answers

    The last rows fit each engine's published milliseconds by a factor of the estimate, a constant for a step and one
    for a sequence: the time of a host grows with sequences and with nothing else.

    KEPT is the file of `whole-steps`.
    """
    need_compiler("tpu")
    rows: list[Row] = []
    with schedule_dumps() as dumps:
        found = Found(dumps, kept)
        for load in published():
            target, _, count = load.device.partition("-")
            times = StepTimes(target, int(count), MODELS[load.model], found)
            rate, step = serve(load, _seconds_of(times, int(count)))
            decode = times.parts(load.at_once, load.inputs + load.outputs / 2)["ms"]
            row: Row = {
                "engine": load.engine,
                "device": load.device,
                "model": load.model,
                "prompt": load.inputs,
                "answer": load.outputs,
                "at once": load.at_once,
                "published": load.tokens_per_second,
                "estimate": rate,
                "ratio": rate / load.tokens_per_second,
                "published ms": load.step,
                "estimate ms": step * 1e3,
                "decode ms": decode,
                "source": load.source,
            }
            rows.append(row)
            yield row
    for engine in dict.fromkeys(row["engine"] for row in rows):
        yield dict.fromkeys(rows[0]) | {"engine": engine, "source": fitted(rows, engine)}


def fitted(rows: list[Row], engine: str) -> str:
    """Say how an engine's published milliseconds follow from the estimated ones and the number of sequences."""
    own = [row for row in rows if row["engine"] == engine]
    estimates = np.array([[row["estimate ms"], 1.0, row["at once"]] for row in own])
    published = np.array([row["published ms"] for row in own])
    (factor, step, sequence), *_ = np.linalg.lstsq(estimates, published, rcond=None)
    worst = np.abs(estimates @ (factor, step, sequence) - published).max()
    text = f"{factor:.2f} x estimate + {step:.1f} ms + {sequence:.3f} ms a sequence"
    return f"published ms = {text}, at most {worst:.1f} ms off in {len(own)} rows"


def _seconds_of(times: StepTimes, count: int) -> Callable[[int, float, Chunks | None], float]:
    def seconds(decodes: int, keys: float, prompts: Chunks | None) -> float:
        return max(times.parts(decodes, keys, prompts)["ms"] / 1e3, host_seconds(decodes, count))

    return seconds


def host_seconds(sequences: int, count: int) -> float:
    """Return the seconds that jpaged's host takes a step of decodes: the line through what `docs/performance.md`
    measures of 128 and 256 sequences on one device, 1.87 and 2.79 ms, and of 128 on eight, 2.14."""
    return (0.95 + 0.0072 * sequences + 0.039 * (count - 1)) / 1e3


def serve(load: Load, seconds: Callable[[int, float, Chunks | None], float]) -> tuple[float, float]:
    """Return the rate of answers' tokens of a load, and the mean seconds between two of a request.

    Args:
        seconds: of a step, by the sequences that decode, their mean number of keys, and its prompts.
    """
    begun = 0
    prompts: deque[int] = deque()  # tokens of each prompt that have been read
    decoding: list[int] = []  # tokens of each answer so far
    clock, answers, between = 0.0, 0, 0.0
    while begun < load.requests or prompts or decoding:
        while begun < load.requests and len(prompts) + len(decoding) < load.at_once:
            prompts.append(0)
            begun += 1
        spans, left = [], load.chunk - len(decoding)
        while prompts and left > 0:
            start = prompts.popleft()
            stop = min(start + left, load.inputs)
            spans.append((start, stop))
            left -= stop - start
            if stop < load.inputs:
                prompts.appendleft(stop)
                break
        keys = load.inputs + sum(decoding) / len(decoding) if decoding else 0.0
        took = seconds(len(decoding), keys, Chunks(tuple(spans)) if spans else None)
        clock, between = clock + took, between + took * len(decoding)
        decoding = [done + 1 for done in decoding] + [1 for _, stop in spans if stop == load.inputs]
        answers += sum(done == load.outputs for done in decoding)
        decoding = [done for done in decoding if done < load.outputs]
    return answers * load.outputs / clock, between / (answers * (load.outputs - 1))

"""Runs a step that was written to a file again, alone, to find out why it gave a token.

A replay puts the step's blocks in their places in a pool of the same size, so that it runs the same program.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.sampling.sampling_batch import top_size
from jpaged.execution.step_dump import Draws, DumpedStep, Inputs, pool_facts
from jpaged.execution.worker import Worker


class Replay(NamedTuple):
    """The results of a step that ran again.

    Attributes:
        dump: the step as it was written.
        drawn: tokens and log-probabilities of the same program, run again.
        ranked: the most likely tokens of each draw with their log-probabilities, of the sampler's full variant.
    """

    dump: DumpedStep
    drawn: Draws
    ranked: Draws

    @property
    def is_same(self) -> bool:
        """Tell whether every token is the one that was recorded."""
        return bool(np.array_equal(self.drawn.tokens, self.dump.drawn.tokens))

    def __str__(self) -> str:
        bucket, chosen = self.dump.inputs.bucket, (self.dump.drawn, self.drawn)
        lines = [f"{bucket}, {len(self.dump.rows)} draws", "request position recorded replayed, most likely tokens"]
        for row, (request, position) in enumerate(self.dump.rows):
            recorded, replayed = (f"{each.tokens[row]} ({each.logprobs[row]:.4f})" for each in chosen)
            likely = zip(self.ranked.top_tokens[row], self.ranked.top_logprobs[row], strict=True)
            marked = "" if self.dump.drawn.tokens[row] == self.drawn.tokens[row] else "  DIFFERENT"
            ranked = " ".join(f"{token} ({logprob:.4f})" for token, logprob in likely)
            lines.append(f"{request} {position} {recorded} {replayed}, {ranked}{marked}")
        return "\n".join(lines)


def replay(worker: Worker, dump: DumpedStep, *, top: int = 5) -> Replay:
    """Run a step again, on a worker that runs nothing else: its pool is emptied before and after.

    Args:
        top: how many of the most likely tokens `Replay.ranked` has.

    Raises:
        ValueError: the worker's pool is laid out otherwise.
    """
    there, here = dump.facts["pool"], json.loads(json.dumps(pool_facts(worker.spec)))
    for name, value in here.items():
        if there.get(name) != value:
            raise ValueError(f"the step was dumped from a pool of {name}={there.get(name)!r}, this one has {value!r}")
    rows = len(dump.rows)
    drawn = _run(worker, dump.inputs, dump.sampling, dump.top, rows)
    asking = dump.sampling._replace(ranked=np.ones_like(dump.sampling.ranked))
    ranked = _run(worker, dump.inputs, asking, max(dump.top, top_size(top)), rows)
    cut = ranked._replace(top_tokens=ranked.top_tokens[:, :top], top_logprobs=ranked.top_logprobs[:, :top])
    return Replay(dump, drawn, cut)


def _run(worker: Worker, inputs: Inputs, sampling: SamplingArrays, top: int, rows: int) -> Draws:
    # Every run starts from the recorded blocks: a step writes KV, and moves recurrent states on.
    worker.restart()
    worker.pool = worker.blocks.write(worker.pool, [inputs.blocks], [inputs.contents])
    worker.last_tokens = inputs.last_tokens
    worker.compute(inputs.batch, inputs.bucket, inputs.num_samples)
    drawn = Draws.of(worker.draw(sampling, top), rows)
    worker.restart()
    return drawn

"""Writes dispatched steps to files, each with everything that it reads, and runs one again alone.

A file has the host arrays of the step, the blocks of the pool that its tables name, as they were before it ran, the
tokens of the step before, the settings of its draws, and the tokens that were drawn. A replay puts the blocks in their
places in a pool of the same size, so that it runs the same program. Nothing in a file is executed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jpaged.execution.batch import StepBatch
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.sampling.sampling_batch import top_size
from jpaged.execution.transfer.pool_blocks import BlockBytes
from jpaged.execution.wire import decode, encode
from jpaged.execution.worker import Worker
from jpaged.scheduling.step import ScheduledStep

if TYPE_CHECKING:
    from jpaged.execution.sampling.sample_step import StepOutput

logger = logging.getLogger(__name__)

FORMAT = 1
MAGIC = b"jpaged step dump"
_NAME = "step"


class Inputs(NamedTuple):
    """Holds the inputs of a step's programs, except the weights.

    Attributes:
        batch, bucket, num_samples: arguments of `Worker.compute`.
        last_tokens: tokens that the step before drew, by row.
        blocks: for each group of the pool the blocks that the step reads or writes.
        contents: their bytes before the step, for each group ``[shards, blocks, bytes]``.
    """

    batch: StepBatch
    bucket: Bucket
    num_samples: int
    last_tokens: Int[np.ndarray, " max_seqs"]
    blocks: Sequence[Sequence[int]]
    contents: Sequence[BlockBytes]


class Draws(NamedTuple):
    """Holds the drawn tokens, one for each requested row of the sampler.

    Attributes:
        logprobs: their log-probabilities; 0 where the sampler found a token without logits.
        top_tokens, top_logprobs: the most likely tokens, best first.
    """

    tokens: Int[np.ndarray, " rows"]
    logprobs: Float[np.ndarray, " rows"]
    top_tokens: Int[np.ndarray, "rows top"]
    top_logprobs: Float[np.ndarray, "rows top"]

    @classmethod
    def of(cls, output: StepOutput, rows: int) -> Draws:
        """Fetch the first `rows` rows of a sampler's output; blocks until the device is done."""
        fetched = jax.device_get((output.tokens, output.logprobs, output.top_tokens, output.top_logprobs))
        return cls(*(array[:rows] for array in fetched))


class DumpedStep(NamedTuple):
    """A step as a file holds it.

    Attributes:
        facts: what describes the engine, as plain data; "pool" is this module's, the rest the recorder's caller's.
        rows: (request id, position of the token) of each draw.
        inputs: what the step read.
        sampling, top: arguments of `Worker.draw`.
        drawn: the tokens that the step gave.
    """

    facts: Mapping[str, Any]
    rows: Sequence[tuple[int, int]]
    inputs: Inputs
    sampling: SamplingArrays
    top: int
    drawn: Draws

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        said = json.dumps({"versions": versions(), "facts": self.facts, "rows": self.rows})
        body = encode(_NAME, (said, *self.inputs, self.sampling, self.top, *self.drawn))
        partial = path.with_name(f".{path.name}.part")
        partial.write_bytes(b"%s %d\n%s\n%s" % (MAGIC, FORMAT, hashlib.sha256(body).hexdigest().encode(), body))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> DumpedStep:
        """Read a file.

        Raises:
            ValueError: it is no dump of a step, is damaged, or was written in another format or by another version.
            OSError: it cannot be read.
        """
        head, _, rest = path.read_bytes().partition(b"\n")
        magic, _, form = head.rpartition(b" ")
        if magic != MAGIC:
            raise ValueError(f"{path} is no dump of a step: it begins with {head[:32]!r}, not {MAGIC!r}")
        if form != str(FORMAT).encode():
            raise ValueError(f"{path} is of format {form.decode()}, and jpaged {version('jpaged')} reads {FORMAT}")
        digest, _, body = rest.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError(f"{path} is damaged: its {len(body):,} bytes have another checksum")
        said_by = json.loads(json.loads(body.partition(b"\0")[0])[1][0])
        if said_by["versions"]["jpaged"] != version("jpaged"):
            raise ValueError(
                f"{path} was written by jpaged {said_by['versions']['jpaged']}, and this is {version('jpaged')}: "
                "replay it with that version"
            )
        _, (_, *values) = decode(body)
        inputs, (sampling, top, *drawn) = Inputs(*values[:6]), values[6:]
        return cls(said_by["facts"], said_by["rows"], inputs, sampling, top, Draws(*drawn))


class StepRecorder:
    """Writes the steps of a runner to a folder; each is waited for, so that its tokens can be written too.

    Args:
        folder: gets a file a step, ``step-000012.jpaged``; it is made where there is none.
        numbers: which steps are written, counted from 0; None = all.
        facts: gives what describes the engine, as plain data; called again after the weights changed.
    """

    def __init__(self, folder: Path, numbers: range | None, facts: Callable[[], Mapping[str, Any]]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds users' tokens
        self._folder = folder
        self._numbers = numbers
        self._find_facts = facts
        self._facts: tuple[int, Mapping[str, Any]] | None = None  # by the number of updates of the weights
        self._count = 0

    def record(
        self, worker: Worker, step: ScheduledStep, batch: StepBatch, bucket: Bucket, blocks: Sequence[Sequence[int]]
    ) -> Recording | None:
        """Copy the inputs of a step that is about to run; None where it is not to be written.

        Args:
            blocks: for each group of the pool the blocks that the step reads or writes.
        """
        number, self._count = self._count, self._count + 1
        if self._numbers is not None and number not in self._numbers:
            return None
        updates = worker.model.num_updates
        if self._facts is None or self._facts[0] != updates:
            self._facts = updates, dict(self._find_facts()) | {"pool": pool_facts(worker.spec)}
        (contents,) = worker.blocks.read(worker.pool, [blocks]).arrays()
        last_tokens = np.asarray(worker.last_tokens)
        inputs = Inputs(batch, bucket, len(step.samples), last_tokens, blocks, contents)
        rows = [(sample.request.request_id, sample.chunk.start + sample.chunk.length) for sample in step.samples]
        return Recording(self._folder / f"step-{number:06d}.jpaged", self._facts[1], rows, inputs)


class Recording(NamedTuple):
    """Holds a step whose inputs were copied and whose tokens are still to be drawn."""

    path: Path
    facts: Mapping[str, Any]
    rows: Sequence[tuple[int, int]]
    inputs: Inputs

    def finish(self, sampling: SamplingArrays, top: int, output: StepOutput) -> None:
        """Wait for the step's tokens and write the file."""
        drawn = Draws.of(output, len(self.rows))
        DumpedStep(self.facts, self.rows, self.inputs, sampling, top, drawn).write(self.path)
        logger.info("wrote %s: %d tokens drawn", self.path, len(self.rows))


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


def pool_facts(spec: PoolSpec) -> dict[str, Any]:
    """Return the facts that a dump's blocks depend on: dtype, shards, and each group's name and view."""
    groups = [plan.spec.name for plan in spec.layout.groups]
    views = {name: list(view) for name, view in zip(groups, spec.views, strict=True)}
    return {"dtype": str(spec.dtype), "shards": spec.shards, "device_bytes": spec.device_bytes, "views": views}


def versions() -> dict[str, str]:
    """Return the versions that a file names."""
    return {name: version(name) for name in ("jpaged", "jax", "jaxlib")}

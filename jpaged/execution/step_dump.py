"""Writes dispatched steps to files, each with everything that it reads, and reads them.

A file has the host arrays of the step, the blocks of the pool that its tables name, as they were before it ran, the
tokens of the step before, the settings of its draws, and the tokens that were drawn. `step_replay` runs one again.
Nothing in a file is executed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jpaged.execution.batch import BY_TOKEN, StepBatch
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.sampling.sample_step import Drawn
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.transfer.pool_blocks import BlockBytes
from jpaged.execution.wire import decode, encode
from jpaged.scheduling.step import ScheduledStep

if TYPE_CHECKING:
    from jpaged.execution.sampling.sample_step import StepOutput

logger = logging.getLogger(__name__)

OnDraw = Callable[[SamplingArrays, int, "StepOutput"], None]
"""Takes the arguments and results of a step's draw."""

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
        tokens, logprobs, _, *top = Drawn.read(jax.device_get(output.words)[:rows])
        return cls(tokens, logprobs, *top)


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
        try:
            partial.write_bytes(b"%s %d\n%s\n%s" % (MAGIC, FORMAT, hashlib.sha256(body).hexdigest().encode(), body))
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)  # a full disk needs the room
            raise

    @classmethod
    def read(cls, path: Path) -> DumpedStep:
        """Read a file.

        Raises:
            ValueError: it is no dump of a step, is damaged, was written in another format or by another version, or
                its parts do not fit together.
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
        with refusing_other_structure(path):
            said_by = json.loads(json.loads(body.partition(b"\0")[0])[1][0])
            writer = said_by["versions"]["jpaged"]
        if writer != version("jpaged"):
            raise ValueError(
                f"{path} was written by jpaged {writer}, and this is {version('jpaged')}: replay it with that version"
            )
        with refusing_other_structure(path):
            _, (_, *values) = decode(body)
            inputs, (sampling, top, *drawn) = Inputs(*values[:6]), values[6:]
            dump = cls(said_by["facts"], said_by["rows"], inputs, sampling, top, Draws(*drawn))
            dump._check()
        return dump

    def _check(self) -> None:
        """Raise ValueError unless the parts fit together: a kernel reads beyond its arrays where they do not."""
        batch, bucket, pool = self.inputs.batch, self.inputs.bucket, self.facts["pool"]
        shapes = {
            **dict.fromkeys(BY_TOKEN, (bucket.tokens,)),
            "query_starts": (bucket.seqs + 1,),
            "kv_lens": (bucket.seqs,),
        }
        for name, shape in shapes.items():
            if (found := getattr(batch, name).shape) != shape:
                raise ValueError(f"{name} has the shape {list(found)}, and {bucket} needs {list(shape)}")
        starts, lengths = batch.query_starts, np.diff(batch.query_starts)
        if starts[0] != 0 or (lengths < 0).any() or starts[-1] > bucket.tokens:
            raise ValueError(f"query_starts must rise from 0 to at most {bucket.tokens}, and do not")
        if (short := batch.kv_lens < lengths).any():
            seq = int(np.argmax(short))
            raise ValueError(f"kv_lens[{seq}]={batch.kv_lens[seq]} is below the sequence's {lengths[seq]} tokens")
        if {len(part) for part in self.drawn} != {len(self.rows)}:
            raise ValueError(f"{len(self.rows)} draws have tokens and log-probabilities of another number")
        for (name, view), blocks, contents in zip(
            pool["views"].items(), self.inputs.blocks, self.inputs.contents, strict=True
        ):
            if not all(0 <= block < view[0] for block in blocks):
                raise ValueError(f"blocks of the group {name} must be from 0 to {view[0] - 1}, and are not")
            if contents.shape[:2] != (pool["shards"], len(blocks)):
                raise ValueError(f"the contents of {len(blocks)} blocks have the shape {list(contents.shape)}")


@contextmanager
def refusing_other_structure(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file whose checksum is right, but whose structure is not, into a ValueError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} holds no step that can run again: {why[:200]}") from error


class StepMemory(NamedTuple):
    """Gives what a step is about to read on the device.

    Attributes:
        spec: of the pool.
        updates: how often the weights were replaced.
        blocks: for each group of the pool the blocks that the step reads or writes.
        contents, last_tokens: fetch their bytes, and the tokens that the step before drew.
    """

    spec: PoolSpec
    updates: int
    blocks: Sequence[Sequence[int]]
    contents: Callable[[], Sequence[BlockBytes]]
    last_tokens: Callable[[], np.ndarray]


class StepRecorder:
    """Writes the steps of a runner to a folder; each is waited for, so that its tokens can be written too.

    Where a file cannot be written, as on a full disk, the engine goes on: an error is logged, and no more steps are
    written.

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
        self._failed = False

    def record(self, memory: StepMemory, step: ScheduledStep, batch: StepBatch, bucket: Bucket) -> OnDraw | None:
        """Copy the inputs of a step that is about to run; return what writes its file, once its tokens were drawn. None
        where it is not to be written."""
        number, self._count = self._count, self._count + 1
        if self._failed or (self._numbers is not None and number not in self._numbers):
            return None
        if self._facts is None or self._facts[0] != memory.updates:
            self._facts = memory.updates, dict(self._find_facts()) | {"pool": pool_facts(memory.spec)}
        inputs = Inputs(batch, bucket, step.num_samples, memory.last_tokens(), memory.blocks, memory.contents())
        rows = [(sample.request.request_id, sample.chunk.start + sample.chunk.length) for sample in step.samples]
        begun = Recording(self._folder / f"step-{number:06d}.jpaged", self._facts[1], rows, inputs)
        return partial(self._finish, begun)

    def _finish(self, begun: Recording, sampling: SamplingArrays, top: int, output: StepOutput) -> None:
        """Wait for the tokens of a step that `record` began, and write its file."""
        drawn = Draws.of(output, len(begun.rows))
        try:
            DumpedStep(begun.facts, begun.rows, begun.inputs, sampling, top, drawn).write(begun.path)
        except OSError as error:
            self._failed = True
            logger.error("%s was not written, nor will later steps be: %s", begun.path, error)
        else:
            logger.info("wrote %s: %d tokens drawn", begun.path, len(begun.rows))


class Recording(NamedTuple):
    """Holds a step whose inputs were copied and whose tokens are still to be drawn."""

    path: Path
    facts: Mapping[str, Any]
    rows: Sequence[tuple[int, int]]
    inputs: Inputs


def pool_facts(spec: PoolSpec) -> dict[str, Any]:
    """Return the facts that a dump's blocks depend on: dtype, shards, and each group's name and view."""
    groups = [layout.spec.name for layout in spec.layout.groups]
    views = {name: list(view) for name, view in zip(groups, spec.views, strict=True)}
    return {"dtype": str(spec.dtype), "shards": spec.shards, "device_bytes": spec.device_bytes, "views": views}


def versions() -> dict[str, str]:
    """Return the versions that a file names."""
    return {name: version(name) for name in ("jpaged", "jax", "jaxlib")}

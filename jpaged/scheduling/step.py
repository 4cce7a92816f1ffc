"""A step while it is being made, and as the scheduler hands it to the device: plain facts, without arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jpaged.scheduling.work import COPIES

if TYPE_CHECKING:
    from jpaged.memory import BlockCopy, StoredAdapter, StoredImage
    from jpaged.pooling_params import Pooling
    from jpaged.scheduling.inputs import Adapter, PromptItem
    from jpaged.scheduling.request import Request, Sequence


UNKNOWN = -1
"""A draft that the device is to make before the step runs."""


class Chunk(NamedTuple):
    """Tokens ``[start, start + length)`` of a sequence to compute.

    A named tuple, not a dataclass: hundreds are made every step.

    Attributes:
        source_row: row of the last step's samples that holds the chunk's last token, which the host has not
            seen; -1 when the host has all tokens.
        tables: the sequence's block tables, one a group, when they changed since its last chunk, else None.
        drafts: guesses of the tokens after the sequence's newest one, or `UNKNOWN`; they are the chunk's last tokens.
    """

    seq: Sequence
    start: int
    length: int
    source_row: int
    tables: list[list[int]] | None
    drafts: tuple[int, ...] = ()

    @property
    def prefixes(self) -> list[Chunk]:
        """Return the chunk cut after the newest token, and after each of its drafts: the last one is the chunk."""
        if not self.drafts:
            return [self]
        known, number = self.length - len(self.drafts), len(self.drafts)
        return [*(self._replace(length=known + i, drafts=self.drafts[:i]) for i in range(number)), self]


class Sample(NamedTuple):
    """A token to draw for `seq` after the last token of `chunk`.

    Where drafts are verified there is a sample for each of `Chunk.prefixes`, in their order.
    """

    request: Request
    seq: Sequence
    chunk: Chunk

    @property
    def is_overtaken(self) -> bool:
        """Tell whether the host has the token already: it was appended as the only one that the grammar allows."""
        seq, chunk = self.seq, self.chunk
        return seq.grammar is not None and chunk.start + chunk.length < len(seq.token_ids)


class Decodes(NamedTuple):
    """Holds plain decodes as columns, in the order in which they were planned: a chunk of one token and its draw each.

    A step has hundreds. Code that treats all alike reads the columns; only code that must look at each one makes a
    `Chunk` and a `Sample` of it.

    Attributes:
        requests, seqs: whose they are.
        starts, sources: see `Chunk.start` and `Chunk.source_row`.
        tables: by place in the columns, the block tables that changed, see `Chunk.tables`.
        full: sequences whose blocks have no room for a token after this one.
    """

    requests: list[Request]
    seqs: list[Sequence]
    starts: Int[np.ndarray, " decodes"]
    sources: Int[np.ndarray, " decodes"]
    tables: dict[int, list[list[int]]]
    full: list[Sequence]

    @classmethod
    def none(cls) -> Decodes:
        """Return empty columns."""
        return cls([], [], np.zeros(0, np.int32), np.zeros(0, np.int32), {}, [])

    @property
    def number(self) -> int:
        """Return how many sequences decode."""
        return len(self.seqs)

    @property
    def chunks(self) -> list[Chunk]:
        """Return the chunk of each."""
        tables = map(self.tables.get, range(self.number))
        return [*map(Chunk, self.seqs, self.starts.tolist(), repeat(1), self.sources.tolist(), tables)]

    def samples(self, chunks: Iterable[Chunk]) -> list[Sample]:
        """Return the sample of each, after its chunk."""
        return [*map(Sample, self.requests, self.seqs, chunks)]


class EncodePart(NamedTuple):
    """Names rounds [`first`, `stop`) of the `total` rounds of an encoder's layers, see `ImageFeatures.rounds`.

    Where `stop` is 0 the device forgets what it has of the image.
    """

    first: int
    stop: int
    total: int


class Encode(NamedTuple):
    """An image to encode before the step's chunks run; its features go to the blocks of `stored`.

    Attributes:
        part: what this step does of it; None = all.
    """

    image: PromptItem
    stored: StoredImage
    part: EncodePart | None = None

    @property
    def completes(self) -> bool:
        """Tell whether the pool has all features of the image after this step."""
        return self.part is None or self.part.stop == self.part.total


class AdapterLoad(NamedTuple):
    """An adapter to be written to the blocks of `stored` before the step's chunks run."""

    adapter: Adapter
    stored: StoredAdapter


class PromptScore(NamedTuple):
    """A prompt token, by its position, whose log-probability a request asks for."""

    request: Request
    position: int


@dataclass(frozen=True)
class ScheduledStep:
    """One iteration. Chunks of one token (decodes) come before longer ones; of these the ones with drafts come first.

    Attributes:
        others, other_samples: the chunks and samples after those of `decodes`, with which they make `chunks` and
            `samples`.
        decodes: the first chunks and samples, where they are plain decodes.
        work: what the device does with whole blocks before the chunks run, by kind, see `jpaged.scheduling.work`.
        preempted: requests whose memory was taken back to make room.
        scored: chunks of requests that ask for prompt_logprobs.
        pooled: chunks of requests that ask for one vector of their prompt, those that it is made of.
        rows: what the chunks' tokens read of what requests hold, by its kind, see `jpaged.scheduling.held`.
        draws_late: whether a draw needs, on the host, a token that the step before draws: that of a sequence with a
            grammar, whose mask follows from it. The chunks can run before that token is read, the draws cannot.
        is_constrained: whether a sequence with rules is sampled.
    """

    others: list[Chunk] = field(default_factory=list)
    other_samples: list[Sample] = field(default_factory=list)
    work: Mapping[str, Seq[Any]] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    scored: list[tuple[Request, Chunk]] = field(default_factory=list)
    pooled: list[tuple[Request, Chunk]] = field(default_factory=list)
    rows: Mapping[str, Seq[Any]] = field(default_factory=dict)
    draws_late: bool = False
    is_constrained: bool = False
    decodes: Decodes = field(default_factory=Decodes.none)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Return all chunks, one a sequence."""
        return self.decodes.chunks + self.others if self.decodes.seqs else self.others

    @cached_property
    def samples(self) -> list[Sample]:
        """Return all tokens to draw; the rows of the sampler are in this order."""
        return self.decodes.samples(self.chunks) + self.other_samples if self.decodes.seqs else self.other_samples

    @property
    def num_chunks(self) -> int:
        return self.decodes.number + len(self.others)

    @property
    def num_samples(self) -> int:
        return self.decodes.number + len(self.other_samples)

    def work_of(self, kind: str) -> Seq[Any]:
        """Return the work of one kind; empty where there is none."""
        return self.work.get(kind, ())

    @property
    def undrafted(self) -> list[Chunk]:
        """Return the chunks whose drafts the device is to make."""
        return [chunk for chunk in self.others if chunk.drafts and chunk.drafts[0] == UNKNOWN]

    def drafted(self, drafts: Mapping[int, tuple[int, ...]]) -> ScheduledStep:
        """Return the step with drafts, by seq_id, in the place of `UNKNOWN` ones, as many as there were."""

        def filled(chunk: Chunk) -> Chunk:
            return chunk._replace(drafts=drafts.get(chunk.seq.seq_id, chunk.drafts)[: len(chunk.drafts)])

        samples = [sample._replace(chunk=filled(sample.chunk)) for sample in self.other_samples]
        return replace(self, others=[filled(chunk) for chunk in self.others], other_samples=samples)

    @cached_property
    def num_tokens(self) -> int:
        return self.decodes.number + sum(chunk.length for chunk in self.others)

    @cached_property
    def num_top(self) -> int:
        """Return how many most likely tokens to find for each sample: the most that any request asks for."""
        requests = chain(self.decodes.requests, (request for request, _, _ in self.other_samples))
        return max(map(attrgetter("num_top"), requests), default=0)

    @property
    def reads_draws(self) -> bool:
        """Tell whether a token has to be drawn: a request for a vector ends with its prompt, whatever comes next."""
        others = self.other_samples
        return bool(self.decodes.seqs) or not others or any(request.pooling is None for request, _, _ in others)

    @property
    def num_decodes(self) -> int:
        """Return how many leading chunks have one token."""
        return self.decodes.number + sum(chunk.length == 1 for chunk in self.others)


class StepPlan:
    """A step being made.

    Args:
        budget: most tokens of the step.

    Attributes:
        left: tokens of the budget not planned yet.
        reserved: part of `left` that decodes not planned yet will take.
        admission_stopped: whether a request could not enter the batch, so that none after it may.
        draft_rows: rows of the sampler that drafts may still take.
        num_drafts: drafts planned so far.
        prefills: chunks of more than one token and whose they are, as planned so far.
        begun: chunks of one token, or none, after which more of the sequence is left to compute, as before a picture
            that is not encoded yet, and whose they are.
        rows: what tokens read of what requests hold, by its kind, as planned so far.
        work: what the device does first with whole blocks, by kind, as planned so far.
    """

    def __init__(self, budget: int) -> None:
        self.left = budget
        self.reserved = 0
        self.admission_stopped = False
        self.draft_rows = 0
        self.num_drafts = 0
        self.preempted: list[Request] = []
        self._plain = Decodes.none()  # those that were planned before anything else
        self._single: list[Chunk] = []
        self.prefills: list[tuple[Request, Chunk]] = []
        self.begun: list[tuple[Request, Chunk]] = []
        self._samples: list[Sample] = []
        self.rows: dict[str, list[Any]] = {}
        self.work: dict[str, list[Any]] = {}
        self._is_constrained = self._draws_late = False
        self._verified: list[Chunk] = []
        self._scored: list[tuple[Request, Chunk]] = []
        self._pooled: list[tuple[Request, Chunk]] = []

    def add(self, request: Request, chunks: list[Chunk], copies: list[BlockCopy]) -> None:
        """Plan a request's chunks; a chunk that ends with the sequence's last token is sampled."""
        for chunk in chunks:
            seq, start, length, _, _, drafts = chunk
            if length == 1:
                self._single.append(chunk)
                if start + 1 < seq.num_tokens:
                    self.begun.append((request, chunk))
            elif drafts:
                self._verified.append(chunk)
                seq.needs_host = True
            else:
                self.prefills.append((request, chunk))
            # Drafts count as computed once they turn out to be the sequence's tokens.
            seq.num_computed = end = start + length - len(drafts)
            if end == seq.num_tokens:
                self.sample(request, seq, chunk)
            if request.params.prompt_logprobs is not None and start + 1 < seq.num_prompt:
                self._scored.append((request, chunk))
            if request.pooling is not None and pools(request.pooling, start, end == seq.num_prompt):
                self._pooled.append((request, chunk))
        if copies:
            self.add_work(COPIES, copies)

    def add_decodes(self, decodes: Decodes) -> None:
        """Plan plain decodes."""
        if self.num_samples or self._single:
            chunks = decodes.chunks
            self._single += chunks
            self._samples += decodes.samples(chunks)
        else:
            self._plain = decodes

    @property
    def decodes(self) -> list[Chunk]:
        """Return the chunks of one token, as planned so far."""
        return self._plain.chunks + self._single

    @property
    def samples(self) -> list[Sample]:
        """Return the tokens to draw, as planned so far."""
        return self._plain.samples(self._plain.chunks) + self._samples

    @property
    def num_samples(self) -> int:
        return self._plain.number + len(self._samples)

    def add_work(self, kind: str, values: Iterable[Any]) -> None:
        """Plan work of a kind on whole blocks."""
        if new := list(values):
            self.work.setdefault(kind, []).extend(new)

    def sample(self, request: Request, seq: Sequence, chunk: Chunk) -> None:
        """Plan to draw the sequence's next token after the last token of `chunk`, or after each of its prefixes."""
        if seq.grammar is not None:
            self._is_constrained = True
            self._draws_late |= chunk.source_row >= 0 and seq.grammar.waits
        seq.num_pending += 1
        seq.pending_row = self.num_samples
        if chunk.drafts:
            self._samples += (Sample(request, seq, prefix) for prefix in chunk.prefixes)
        else:
            self._samples.append(Sample(request, seq, chunk))

    def step(self) -> ScheduledStep:
        return ScheduledStep(
            others=self._single + self._verified + [chunk for _, chunk in self.prefills],
            other_samples=self._samples,
            work=self.work,
            preempted=self.preempted,
            scored=self._scored,
            pooled=self._pooled,
            rows=self.rows,
            draws_late=self._draws_late,
            is_constrained=self._is_constrained,
            decodes=self._plain,
        )


def pools(pooling: Pooling, start: int, is_last: bool) -> bool:
    """Tell whether a chunk from token `start` on, the prompt's last one or not, is part of the prompt's vector."""
    if pooling in ("last", "cls"):
        return is_last if pooling == "last" else start == 0
    return True


def decodes_due(requests: Iterable[Request]) -> int:
    """Return how many sequences of `requests` have exactly one token to compute."""
    return sum(missing_tokens(request, seq) == 1 for request in requests for seq in request.sequences)


def missing_tokens(request: Request, seq: Sequence) -> int:
    """Return how many tokens of a sequence can be computed; 0 once it ended or its last token is on its way, while it
    waits to be forked, and while the host must see its newest token first."""
    if seq.finish_reason is not None or seq.parent is not None:
        return 0
    if seq.awaits_mask or (seq.num_pending and (request.needs_host or seq.needs_host or seq.is_slow)):
        return 0
    total = len(seq.token_ids) + seq.num_pending
    return 0 if total >= request.max_total_tokens else total - seq.num_computed


def source_row(seq: Sequence, end: int) -> int:
    """Return the row of the last step's samples that holds token ``end - 1``, or -1 when the host has it."""
    return seq.pending_row if end > len(seq.token_ids) else -1

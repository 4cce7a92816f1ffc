"""A step while it is being made, and the tokens that a sequence still has to compute."""

from __future__ import annotations

from collections.abc import Iterable

from jpaged.memory import BlockCopy, DiskFill, DiskWrite, HostBlock, SwapCopy
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.step import AdapterLoad, AdapterUse, Chunk, Encode, ImageRead, Sample, ScheduledStep


class StepPlan:
    """A step being made.

    Args:
        budget: most tokens of the step.
        dropped: host blocks whose content is of no use any more.

    Attributes:
        left: tokens of the budget not planned yet.
        reserved: part of `left` that decodes not planned yet will take.
        admission_stopped: whether a request could not enter the batch, so that none after it may.
        free_rows: rows of the sampler that drafts may still take.
        num_drafts: drafts planned so far.
        decodes: chunks of one token, as planned so far.
        prefills: chunks of more than one token and whose they are, as planned so far.
        samples: tokens to draw, as planned so far.
        copies: block copies that the device makes before the chunks run.
        encodes: images to encode first.
        reads: tokens that stand for images, as planned so far.
        loads: adapters to load first.
        to_disk: blocks whose content goes to disk first.
        from_disk: blocks that are filled with content read from disk.
    """

    def __init__(self, budget: int, dropped: list[HostBlock]) -> None:
        self.left = budget
        self.reserved = 0
        self.admission_stopped = False
        self.free_rows = 0
        self.num_drafts = 0
        self.preempted: list[Request] = []
        self.swap_out: list[SwapCopy] = []
        self.swap_in: list[SwapCopy] = []
        self.decodes: list[Chunk] = []
        self.prefills: list[tuple[Request, Chunk]] = []
        self.samples: list[Sample] = []
        self.copies: list[BlockCopy] = []
        self.encodes: list[Encode] = []
        self.reads: list[ImageRead] = []
        self.loads: list[AdapterLoad] = []
        self.to_disk: list[DiskWrite] = []
        self.from_disk: list[DiskFill] = []
        self._adapted: list[AdapterUse] = []
        self._verified: list[Chunk] = []
        self._dropped = dropped
        self._scored: list[tuple[Request, Chunk]] = []
        self._pooled: list[tuple[Request, Chunk]] = []

    def add(self, request: Request, chunks: list[Chunk], copies: list[BlockCopy]) -> None:
        """Plan a request's chunks; a chunk that ends with the sequence's last token is sampled."""
        for chunk in chunks:
            seq, start, length, _, _, drafts = chunk
            if length == 1:
                self.decodes.append(chunk)
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
            if request.pooling is not None and (request.pooling == "mean" or end == seq.num_prompt):
                self._pooled.append((request, chunk))
        if request.adapter is not None and chunks:
            assert request.held_adapter is not None, "a running request holds its adapter"
            self._adapted += (AdapterUse(c.seq.seq_id, request.adapter, request.held_adapter) for c in chunks)
        self.copies += copies

    def sample(self, request: Request, seq: Sequence, chunk: Chunk) -> None:
        """Plan to draw the sequence's next token after the last token of `chunk`, or after each of its prefixes."""
        seq.num_pending += 1
        seq.pending_row = len(self.samples)
        if chunk.drafts:
            self.samples += (Sample(request, seq, prefix) for prefix in chunk.prefixes)
        else:
            self.samples.append(Sample(request, seq, chunk))

    def step(self) -> ScheduledStep:
        return ScheduledStep(
            chunks=self.decodes + self._verified + [chunk for _, chunk in self.prefills],
            samples=self.samples,
            copies=self.copies,
            preempted=self.preempted,
            dropped=self._dropped,
            swap_out=self.swap_out,
            swap_in=self.swap_in,
            scored=self._scored,
            pooled=self._pooled,
            encodes=self.encodes,
            reads=self.reads,
            loads=self.loads,
            adapted=self._adapted,
            to_disk=self.to_disk,
            from_disk=self.from_disk,
        )


def decodes_due(requests: Iterable[Request]) -> int:
    """Return how many sequences of `requests` have exactly one token to compute."""
    return sum(missing_tokens(request, seq) == 1 for request in requests for seq in request.sequences)


def missing_tokens(request: Request, seq: Sequence) -> int:
    """Return how many tokens of a sequence can be computed; 0 once it ended or its last token is on its way, while it
    waits to be forked, and while the host must see its newest token first."""
    if seq.finish_reason is not None or seq.parent is not None:
        return 0
    if seq.num_pending and (request.needs_host or seq.needs_host):
        return 0
    total = len(seq.token_ids) + seq.num_pending
    return 0 if total >= request.max_total_tokens else total - seq.num_computed


def source_row(seq: Sequence, end: int) -> int:
    """Return the row of the last step's samples that holds token ``end - 1``, or -1 when the host has it."""
    return seq.pending_row if end > len(seq.token_ids) else -1

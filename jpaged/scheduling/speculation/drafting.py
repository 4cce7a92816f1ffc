"""Decides which sequences of a step get drafts, and learns from the samples that verify them."""

from __future__ import annotations

from collections.abc import Mapping

from jpaged.scheduling.allocation import Allocation
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.speculation import Speculation
from jpaged.scheduling.step import Chunk, ScheduledStep, StepPlan


class Drafting:
    """Asks a `Speculation` for the drafts of each step.

    Args:
        speculation: makes drafts.
        max_num_seqs: number of rows for sequences.
    """

    def __init__(self, speculation: Speculation, allocation: Allocation, max_num_seqs: int) -> None:
        self._speculation = speculation
        self._allocation = allocation
        self._max_num_seqs = max_num_seqs

    @property
    def _batch(self) -> int:
        """Return how many sequences have a row; at least 1, because the sequence in question may have lost its row
        while its last step was computed."""
        return max(1, self._max_num_seqs - len(self._allocation.free_rows))

    def drafts(self, request: Request, seq: Sequence, plan: StepPlan) -> tuple[int, ...]:
        """Return the drafts to verify after a sequence's newest token, the only one that it has to compute."""
        if seq.num_pending or not _may_draft(request, seq):
            return ()
        most = min(plan.draft_rows, plan.left - plan.reserved)
        return self._speculation.draft(request, seq, most, batch=self._batch, verifies=plan.num_drafts > 0)

    def took(self, seq: Sequence) -> None:
        """Learn from a sequence's newest token."""
        self._speculation.took(seq)

    def learn(self, step: ScheduledStep, went_on: Mapping[Sequence, Request], free_rows: int) -> None:
        """Learn which drafts of a step were kept, and mark the sequences that wait for the host so that new drafts can
        be made.

        Where drafts would find no rows, none waits: the engine runs ahead as without speculation.

        Args:
            went_on: sequences that got tokens from the step, with their requests.
            free_rows: rows of the sampler that the drafts of a step planned now may take.
        """
        for chunk in step.chunks:
            if chunk.drafts:
                known = chunk.start + chunk.length - len(chunk.drafts)
                kept = max(0, len(chunk.seq.token_ids) - known - 1)
                self._speculation.verified(chunk.seq, len(chunk.drafts), kept)
        for seq, request in went_on.items():
            could = free_rows > 0 and not seq.finished and _may_draft(request, seq)
            seq.needs_host = could and self._speculation.worth_waiting(request, seq, free_rows, batch=self._batch)


def _may_draft(request: Request, seq: Sequence) -> bool:
    """Tell whether a sequence may have drafts at all: its request does not need the pool for itself, and no other
    sequence is about to be forked from it."""
    return not request.runs_exclusively and all(other.parent is not seq for other in request.sequences)


def drafts_kept(seq: Sequence, chunk: Chunk) -> bool:
    """Tell whether a sequence drew all drafts of a chunk, one of `Chunk.prefixes`, whose samples are taken in their
    order."""
    if not chunk.drafts:
        return True
    return len(seq.token_ids) == chunk.start + chunk.length and seq.token_ids[-1] == chunk.drafts[-1]

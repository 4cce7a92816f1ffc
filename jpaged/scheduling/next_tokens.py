"""Plans which tokens of a running request come next, with the blocks, drafts and images that they take."""

from __future__ import annotations

from collections.abc import Callable

from jpaged.memory import BlockCopy
from jpaged.scheduling.allocation import Allocation
from jpaged.scheduling.drafting import Drafting
from jpaged.scheduling.encoding import Encoding
from jpaged.scheduling.forks import children_due, tokens_to_fork
from jpaged.scheduling.prompt_end import tokens_before_end
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.step import Chunk
from jpaged.scheduling.step_builder import StepPlan, missing_tokens, source_row

MakeRoom = Callable[[Sequence, list[BlockCopy]], bool]
"""Frees memory for a sequence, whose request has these copies planned so far; False = its request is not to go on."""


class NextTokens:
    """Puts the next chunks of requests into a step.

    Args:
        allocation, encoding, drafting: the blocks, the images and the drafts of running sequences.
        max_chunk: most tokens of one prompt in one step.
        prompt_tail: what the layers' policies ask for, see `tokens_before_end`.
    """

    def __init__(
        self, allocation: Allocation, encoding: Encoding, drafting: Drafting, *, max_chunk: int, prompt_tail: int
    ) -> None:
        self._allocation = allocation
        self._encoding = encoding
        self._drafting = drafting
        self._max_chunk = max_chunk
        self._prompt_tail = prompt_tail

    def plan(self, request: Request, plan: StepPlan, make_room: MakeRoom) -> bool:
        """Plan the next tokens of a running request; return False, with none of them in the plan, where it does not go
        on because `make_room` said so."""
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        for seq in request.sequences:
            missing = missing_tokens(request, seq)
            length = missing
            if missing > 1:
                most = tokens_to_fork(request.sequences, seq)
                length = min(missing, plan.left - plan.reserved, self._max_chunk, most)
                length = tokens_before_end(seq, length, self._prompt_tail)
            if length > 0 and self._encoding.is_due(request, seq):
                budget = plan.left - plan.reserved + (missing == 1)
                while (reach := self._encoding.reach(request, seq.num_computed, length, budget)) is None:
                    if not make_room(seq, copies):
                        return False
                length = reach.length
                plan.left -= reach.cost
            if length <= 0:
                continue
            tables = None
            drafts = self._drafting.drafts(request, seq, plan) if missing == 1 else ()
            end = seq.num_computed + length + len(drafts)
            if drafts and end > seq.capacity:
                made = self._allocation.allocate(seq, end)
                if made is None:  # nobody gives memory back for a guess
                    drafts, end = (), seq.num_computed + length
                else:
                    copies += made
                    tables = self._allocation.tables(seq)
            if end > seq.capacity:
                while (made := self._allocation.allocate(seq, end)) is None:
                    shorter = self._encoding.shorten(request, seq.num_computed, length, chunks)
                    if shorter is not None:
                        length, end = shorter, seq.num_computed + shorter
                        continue
                    if not make_room(seq, copies):
                        return False
                copies += made
                tables = self._allocation.tables(seq)
            length += len(drafts)
            plan.num_drafts += len(drafts)
            plan.free_rows -= len(drafts)
            chunks.append(Chunk(seq, seq.num_computed, length, source_row(seq, end - len(drafts)), tables, drafts))
            plan.left -= length
            plan.reserved -= missing == 1
        self.put(request, chunks, copies, plan)
        return True

    def put(self, request: Request, chunks: list[Chunk], copies: list[BlockCopy], plan: StepPlan) -> None:
        """Put a request's chunks into the step, and fork the sequences that begin where one of them ends."""
        plan.add(request, chunks, copies)
        if request.images:
            for chunk in chunks:
                plan.reads += self._encoding.reads(request, chunk)
        if len(request.sequences) > 1:
            for chunk in chunks:
                for child in children_due(request.sequences, chunk.seq):
                    self._allocation.fork(chunk.seq, child)
                    if child.num_computed == child.num_tokens:
                        plan.sample(request, child, chunk)

"""Plans the next tokens of running requests, with the blocks and drafts that they take, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from jpaged.memory import BlockCopy
from jpaged.scheduling.allocation import Allocation, children_due, tokens_before_end, tokens_to_fork
from jpaged.scheduling.queues import Queues
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.speculation.drafting import Drafting
from jpaged.scheduling.step import Chunk, Decodes, StepPlan, missing_tokens, source_row
from jpaged.scheduling.work import COPIES

MakeRoom = Callable[[Sequence, list[BlockCopy]], bool]
"""Frees memory for a sequence, whose request has these copies planned so far; False = its request is not to go on."""


class NextTokens:
    """Puts the next chunks of requests into a step.

    Args:
        allocation: the blocks of running sequences, and what requests hold.
        drafting: their drafts; None = no draft is verified.
        max_chunk: most tokens of one prompt in one step.
    """

    def __init__(self, allocation: Allocation, drafting: Drafting | None, *, max_chunk: int) -> None:
        self._allocation = allocation
        self._holds = allocation.holds
        self._drafting = drafting
        self._max_chunk = max_chunk
        self._prompt_tail = allocation.memory.layout.prompt_tail

    def plan(self, request: Request, plan: StepPlan, make_room: MakeRoom) -> bool:
        """Plan the next tokens of a running request; return False, with none of them in the plan, where it does not go
        on because `make_room` said so."""
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        begun: list[Chunk] = []
        for seq in request.sequences:
            missing = missing_tokens(request, seq)
            length = missing
            if missing > 1:
                most = tokens_to_fork(request.sequences, seq)
                length = min(missing, plan.left - plan.reserved, self._max_chunk, most)
                length = tokens_before_end(seq, length, self._prompt_tail)
            if length > 0 and request.asks:
                budget = plan.left - plan.reserved + (missing == 1)
                while (reach := self._holds.reach(request, seq, length, budget)) is None:
                    if not make_room(seq, copies):
                        return False
                length = reach.length
                plan.left -= reach.cost
            if length <= 0:
                if missing > 1:
                    begun.append(Chunk(seq, seq.num_computed, 0, -1, None))
                continue
            tables = None
            drafts: tuple[int, ...] = ()
            if missing == 1 and self._drafting is not None:
                drafts = self._drafting.drafts(request, seq, plan)
            end = seq.num_computed + length + len(drafts)
            if drafts and end > seq.capacity:
                made = self._allocation.allocate(seq, end)
                if made is None:  # no request is preempted for a guess
                    drafts, end = (), seq.num_computed + length
                else:
                    copies += made
                    tables = self._allocation.tables(seq)
            if end > seq.capacity:
                while (made := self._allocation.allocate(seq, end)) is None:
                    shorter = self._holds.shorten(request, seq.num_computed, length, chunks)
                    if shorter is not None:
                        length, end = shorter, seq.num_computed + shorter
                        continue
                    if not make_room(seq, copies):
                        return False
                copies += made
                tables = self._allocation.tables(seq)
            length += len(drafts)
            plan.num_drafts += len(drafts)
            plan.draft_rows -= len(drafts)
            chunks.append(Chunk(seq, seq.num_computed, length, source_row(seq, end - len(drafts)), tables, drafts))
            plan.left -= length
            plan.reserved -= missing == 1
        plan.begun += ((request, chunk) for chunk in begun)
        self.put(request, chunks, copies, plan)
        return True

    def put(self, request: Request, chunks: list[Chunk], copies: list[BlockCopy], plan: StepPlan) -> None:
        """Put a request's chunks into the step, and fork the sequences that begin where one of them ends."""
        plan.add(request, chunks, copies)
        if request.asks:
            self._holds.add_rows(plan, request, chunks)
        if any(seq.parent is not None for seq in request.sequences):
            for chunk in chunks:
                for child in children_due(request.sequences, chunk.seq):
                    self._allocation.fork(chunk.seq, child)
                    if child.num_computed == child.num_tokens:
                        plan.sample(request, child, chunk)


def plan_decodes(queues: Queues, position: int, plan: StepPlan, allocation: Allocation) -> int:
    """Plan the next tokens of running requests from `position` on; return the position of the first one that is not
    plain, has several sequences or more than one token to compute, reads what it holds, or finds no block for it.

    Drafts are not considered: it is for schedulers without speculation.
    """
    holds, running, copies_made = allocation.holds, queues.running, list[BlockCopy]()
    seqs, full, ended = list[Sequence](), list[Sequence](), list[int]()
    starts, sources, tables = list[int](), list[int](), dict[int, list[list[int]]]()
    row = plan.num_samples
    # One loop over a step's hundreds of sequences, which finds processor caches empty, so it reads as few objects as
    # it can: what the sequences have in common is looked at after it, and their requests are not.
    for alone in islice(queues.alone, position, None):
        if alone is None:
            request = running[position + len(seqs) + len(ended)]
            if len(request.sequences) > 1 or not request.is_plain:
                break
            seq, most = request.sequences[0], request.max_total_tokens
            if holds.reads_at(request, seq.num_computed):
                break
        else:
            seq, most = alone
        start, pending = seq.num_computed, seq.num_pending
        end, total = start + 1, len(seq.token_ids) + pending
        if total >= most:  # its last token is on its way
            ended.append(len(seqs) + len(ended))
            continue
        if end != total:
            break
        if end >= seq.capacity:
            if end > seq.capacity:
                copies = allocation.allocate(seq, end)
                if copies is None:
                    break
                copies_made += copies
                tables[len(seqs)] = allocation.tables(seq)
            if end >= seq.capacity:
                full.append(seq)
        seqs.append(seq)
        starts.append(start)
        sources.append(seq.pending_row if pending else -1)
        seq.num_computed, seq.num_pending, seq.pending_row = end, pending + 1, row
        row += 1
    if copies_made:
        plan.add_work(COPIES, copies_made)
    planned = len(seqs)
    stop = position + planned + len(ended)
    if planned:
        requests = running[position:stop]
        for place in reversed(ended):
            del requests[place]
        columns = np.array(starts, np.int32), np.array(sources, np.int32)
        plan.add_decodes(Decodes(requests, seqs, *columns, tables, full))
    plan.left -= planned
    plan.reserved -= planned
    return stop

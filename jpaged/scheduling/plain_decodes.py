"""Plans the bulk of a step: requests of one sequence that need the next token and nothing else.

Most of a step's sequences are such. They are planned in one loop, which gives the plan that `NextTokens.plan` would
give at a fraction of its price: at thousands of sequences the scheduler's time is the step's.
"""

from __future__ import annotations

from itertools import islice

from jpaged.scheduling.allocation import Allocation
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import Chunk, Sample
from jpaged.scheduling.step_builder import StepPlan


def plan_decodes(running: list[Request], position: int, plan: StepPlan, allocation: Allocation) -> int:
    """Plan the next tokens of running requests from `position` on; return the position of the first one that is not
    plain, has several sequences, has not exactly one token to compute, or finds no block for it.

    Drafts are not considered: it is for schedulers without speculation.
    """
    decodes, samples, new = plan.decodes, plan.samples, tuple.__new__
    first = row = len(samples)
    for request in islice(running, position, None):
        seq, *others = request.sequences
        start, pending = seq.num_computed, seq.num_pending
        end = start + 1
        is_last = end >= request.max_total_tokens
        if others or is_last or not request.is_plain or end != len(seq.token_ids) + pending:
            break
        tables = None
        if end > seq.capacity:
            copies = allocation.allocate(seq, end)
            if copies is None:
                break
            plan.copies += copies
            tables = allocation.tables(seq)
        # `tuple.__new__` is what `Chunk(...)` comes to, without its call in between: it counts here.
        chunk = new(Chunk, (seq, start, 1, seq.pending_row if pending else -1, tables, ()))
        decodes.append(chunk)
        samples.append(new(Sample, (request, seq, chunk)))
        seq.num_computed, seq.num_pending, seq.pending_row = end, pending + 1, row
        row += 1
    planned = row - first
    plan.left -= planned
    plan.reserved -= planned
    return position + planned

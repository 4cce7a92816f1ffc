"""Forks, extends and frees the sequences of a beam request as its search goes on; there are as many as beams.

They begin as any request of several sequences, forked at the end of the prompt (see `plan_forks` of
`jpaged.scheduling.allocation`). Each step of the search a beam that several candidates continue is forked into the
sequences of beams that none continues, so that their number, their places in the batch and their identifiers stay
(PagedAttention, section 4.4).
"""

from __future__ import annotations

from jpaged.scheduling.allocation import Allocation
from jpaged.scheduling.beam import BeamSearch, Continuation, Hypothesis
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.top_tokens import TokenRanking


def offer(request: Request, seq: Sequence, candidates: TokenRanking, allocation: Allocation) -> bool:
    """Take the most likely next tokens of one beam; with the last beam's the search goes one step further.

    Returns True when it is over: the request's sequences are the outputs then, best first, and hold nothing.
    """
    assert request.beam is not None
    seq.candidates = candidates
    rankings = [s.candidates for s in request.sequences if s.candidates is not None and _is_settled(s)]
    if len(rankings) < len(request.sequences):
        return False
    going_on = request.beam.advance([s.output_token_ids for s in request.sequences], rankings)
    for s in request.sequences:
        s.candidates = None
    if going_on:
        request.sequences = _continue(request.sequences, going_on, request.beam.logprobs, allocation)
        return False
    _end(request, request.beam, allocation)
    return True


def _is_settled(seq: Sequence) -> bool:
    """Tell whether nothing of the sequence is being computed, or has to be again after a preemption."""
    return not seq.num_pending and seq.num_computed == len(seq.token_ids)


def _continue(
    beams: list[Sequence], going_on: list[Continuation], logprobs: list[float], allocation: Allocation
) -> list[Sequence]:
    parents = {beam.parent for beam in going_on}
    free = [seq for number, seq in enumerate(beams) if number not in parents]
    for seq in free:
        allocation.drop(seq)
    following, used = [], set()
    for parent, _ in going_on:
        seq = beams[parent]
        if parent in used:
            seq = free.pop()
            seq.token_ids = beams[parent].token_ids.copy()
            allocation.fork(beams[parent], seq)
        used.add(parent)
        following.append(seq)
    for seq, beam, logprob in zip(following, going_on, logprobs, strict=True):
        seq.token_ids.append(beam.token)
        seq.cumulative_logprob = logprob
    return following


def _end(request: Request, search: BeamSearch, allocation: Allocation) -> None:
    for index, (seq, hypothesis) in enumerate(zip(request.sequences, search.finished, strict=True)):
        allocation.release(seq)
        _become(seq, index, hypothesis)


def _become(seq: Sequence, index: int, hypothesis: Hypothesis) -> None:
    seq.index = index
    seq.token_ids = seq.token_ids[: seq.num_prompt] + hypothesis.token_ids
    seq.cumulative_logprob, seq.score = hypothesis.logprob, hypothesis.score
    seq.finish_reason = hypothesis.finish_reason

"""Puts requests back to the beginning of their computation: after a failure only the host's tokens are trusted."""

from __future__ import annotations

from dataclasses import replace

from jpaged.scheduling.hooks import make_mask
from jpaged.scheduling.request import Request, Sequence, Status, find_stop


def begin_again(request: Request) -> None:
    """Make an unfinished request wait and hold nothing, from any state that an exception left it in.

    Its sequences keep their tokens. Grammars and stop searches follow these anew, and a sequence that its last token
    ends is ended. A beam search begins again at its prompt, because it may have been torn between two beams; it finds
    the same outputs.
    """
    if request.beam is not None:
        _search_again(request)
    for seq in request.sequences:
        seq.num_pending = seq.num_computed = seq.capacity = seq.fork_at = 0
        seq.row = seq.pending_row = -1
        seq.needs_host = seq.awaits_mask = seq.is_slow = False
        seq.parent = seq.candidates = None
        del seq.logprobs[seq.num_output :]
        if seq.logprobs:
            seq.cumulative_logprob = sum(logprob for logprob, _ in seq.logprobs)
        if seq.finish_reason is None and request.beam is None:
            _look_again(request, seq)
    request.held.clear()
    request.status = Status.WAITING


def _look_again(request: Request, seq: Sequence) -> None:
    tokens = seq.output_token_ids
    if seq.grammar is not None:
        seq.grammar.restart(tokens)
        make_mask(seq.grammar)
    if seq.stop_search is not None:
        seq.stop_search.restart()
        seq.stop_search.push(tokens[:-1])
    stop = find_stop(request, seq) if tokens else None
    if stop is not None:
        seq.finish_reason, seq.stop_reason = stop


def _search_again(request: Request) -> None:
    assert request.beam is not None
    request.beam.begin()
    for index, seq in enumerate(request.sequences):
        seq.index = index
        seq.token_ids = list(request.prompt_token_ids)
        seq.cumulative_logprob = 0.0
        seq.finish_reason = seq.score = None


def copy_unstarted(request: Request) -> Request:
    """Return a request like one that finished, under the same ids, that can be run again."""
    prompt = request.prompt_token_ids
    sequences = [Sequence(seq.seq_id, i, list(prompt), len(prompt)) for i, seq in enumerate(request.sequences)]
    return replace(
        request, sequences=sequences, status=Status.WAITING, prompt_logprobs={}, pooled={}, held={}, pause_times=[]
    )

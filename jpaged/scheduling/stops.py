"""Decides when a sequence ends: by its newest token, its length, its grammar, or a stop string."""

from __future__ import annotations

from jpaged.outputs import FinishReason
from jpaged.scheduling.request import Request, Sequence

Stop = tuple[FinishReason, str | int | None]
"""A finish_reason and a stop_reason."""


def find_stop(request: Request, seq: Sequence) -> Stop | None:
    """Say why the sequence ends with its newest token, or return None when it goes on.

    A stop string that `seq.stop_search` finds wins over the reason that `token_stop` gives for the same token.
    """
    stop, found = token_stop(request, seq), None
    if seq.stop_search is None:
        return stop
    if stop is None or not request.hides_last(seq, stop[0]):
        found = seq.stop_search.push(seq.token_ids[-1:])
    if found is None and stop is not None:
        found = seq.stop_search.finish()
    return stop if found is None else ("stop", found)


def token_stop(request: Request, seq: Sequence) -> Stop | None:
    """Say why the sequence ends by its newest token alone, or return None when it goes on.

    A stop token wins over the length limit it may hit at once, and so does the end of a grammar; neither it nor
    end-of-sequence leaves a stop_reason. That of a grammar that cannot be followed any further is its error.
    """
    token_ids, grammar = seq.token_ids, seq.grammar
    token = token_ids[-1]
    if token in request.stop_ids and len(token_ids) - seq.num_prompt >= request.params.min_tokens:
        return "stop", None if token in request.eos_ids else token
    if grammar is not None and grammar.error is not None:
        return "abort", grammar.error
    if grammar is not None and grammar.complete:
        return "stop", None
    if len(token_ids) >= request.max_total_tokens:
        return "length", None
    return None

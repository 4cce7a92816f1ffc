"""When a sequence ends by its tokens. Stop strings need text and are found by the detokenizer."""

from __future__ import annotations

from jpaged.outputs import FinishReason
from jpaged.scheduling.request import Request, Sequence


def token_stop(request: Request, seq: Sequence) -> tuple[FinishReason, int | None] | None:
    """Why the sequence ends with its newest token: (finish_reason, stop_reason), or None when it goes on.

    A stop token wins over the length limit it may hit at once, and so does the end of a grammar; neither it nor
    end-of-sequence leaves a stop_reason.
    """
    token = seq.token_ids[-1]
    if token in request.stop_ids and len(seq.token_ids) - seq.num_prompt >= request.params.min_tokens:
        return "stop", None if token in request.eos_ids else token
    if seq.grammar is not None and seq.grammar.error is not None:
        return "abort", None
    if seq.grammar is not None and seq.grammar.complete:
        return "stop", None
    if len(seq.token_ids) >= request.max_total_tokens:
        return "length", None
    return None

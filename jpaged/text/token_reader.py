"""Reads the tokens that a request gained since the last read, as plain facts for another thread."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.outputs import FinishReason, TokenSpan
from jpaged.scheduling import Request, Sequence, Status
from jpaged.scheduling.top_tokens import TokenRanking
from jpaged.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of one sequence that its reader has not seen.

    Attributes:
        index: the sequence's place among the request's outputs.
        token_ids: the new tokens.
        num_shown: number of leading `token_ids` that the text is made of.
        text: the new text where the search for stop strings made it; None where the reader has to.
        spans: see `CompletionOutput.added_token_spans`; those of the whole text so far, where `text` is not None.
        logprobs: a log-probability and ranking for each token, where the request asks for them.
        cumulative_logprob: the sum over all of the sequence's tokens so far.
        finish_reason, stop_reason, score: see `CompletionOutput`.
    """

    index: int
    token_ids: list[int]
    num_shown: int
    text: str | None
    spans: list[TokenSpan]
    logprobs: list[tuple[float, TokenRanking]]
    cumulative_logprob: float
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    score: float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """The news of a request: its sequences with new tokens, and whether it is done."""

    outputs: list[NewTokens]
    finished: bool


class TokenReader:
    """Reads the tokens of a request that its reader has not seen yet, at a cost that grows with their number only.

    It looks at the request, not at steps, so nothing is lost while others drive the engine. Only the thread that
    drives the engine may call `read`.

    Args:
        whole: whether the reader waits for the request's end; a beam search always does.

    Attributes:
        done: whether everything was read.
    """

    def __init__(self, request: Request, *, whole: bool = False) -> None:
        self._request = request
        self._whole = whole or request.beam is not None
        count = sum(len(part.sequences) for part in request.all_requests)
        self._num_tokens = [0] * count
        self._num_characters = [0] * count
        self._ended = [False] * count
        self.done = False

    def read(self) -> Progress | None:
        """Return the new tokens, or None if there are none."""
        parts = self._request.all_requests
        finished = all(part.status is Status.FINISHED for part in parts)
        if self.done or (self._whole and not finished):
            return None
        outputs = [new for part in parts for seq in part.sequences if (new := self._new(seq)) is not None]
        self.done = finished
        return Progress(outputs, finished) if outputs or finished else None

    def _new(self, seq: Sequence) -> NewTokens | None:
        i, request = seq.index, self._request
        start = self._num_tokens[i]
        token_ids = seq.token_ids[seq.num_prompt + start :]
        if self._ended[i] or not (token_ids or seq.finished):
            return None
        self._num_tokens[i], self._ended[i] = start + len(token_ids), seq.finished
        # A stop token that is hidden is among the new ones: the step that brought it ended the sequence.
        hidden = bool(token_ids) and request.hides_last(seq, seq.finish_reason)
        return NewTokens(
            index=i,
            token_ids=token_ids,
            num_shown=len(token_ids) - hidden,
            text=self._new_text(seq),
            spans=list(seq.stop_search.spans) if isinstance(seq.stop_search, Detokenizer) else [],
            logprobs=seq.logprobs[start:],
            cumulative_logprob=seq.cumulative_logprob,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            score=seq.score,
        )

    def _new_text(self, seq: Sequence) -> str | None:
        detokenizer = seq.stop_search
        if not isinstance(detokenizer, Detokenizer):
            return None
        shown, settled = self._num_characters[seq.index], detokenizer.num_settled
        self._num_characters[seq.index] = settled
        return detokenizer.text[shown:settled]

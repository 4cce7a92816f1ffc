"""What users get of a request: all of it, or what is new."""

from __future__ import annotations

from typing import Any

from jpaged.logprobs import by_token
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
from jpaged.scheduling import Request, Sequence, Status


def request_output(request: Request, tokenizer: Any, request_id: int | str | None = None) -> RequestOutput:
    """Everything a request has generated so far.

    Args:
        request_id: the caller's own name for it; None = the engine's number.
    """
    return RequestOutput(
        request_id=request.request_id if request_id is None else request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[_completion(request, seq, tokenizer) for seq in request.sequences],
        finished=request.status is Status.FINISHED,
        num_cached_tokens=request.num_cached_tokens,
        metrics=request.metrics(),
        prompt_logprobs=_prompt_logprobs(request, tokenizer),
    )


def _completion(request: Request, seq: Sequence, tokenizer: Any) -> CompletionOutput:
    params = request.params
    text = "" if seq.text is None else seq.text[: seq.num_settled]
    if seq.text is None and params.detokenize and tokenizer is not None:
        text = tokenizer.decode(request.text_tokens(seq), skip_special_tokens=params.skip_special_tokens)
    return CompletionOutput(
        index=seq.index,
        text=text,
        token_ids=seq.output_token_ids,
        cumulative_logprob=seq.cumulative_logprob,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        score=seq.score,
        logprobs=None if params.logprobs is None else _logprobs(seq, tokenizer),
    )


def _prompt_logprobs(request: Request, tokenizer: Any) -> list[dict[int, Logprob] | None] | None:
    prompt, found = request.prompt_token_ids, request.prompt_logprobs
    if request.params.prompt_logprobs is None or len(found) < len(prompt) - 1:
        return None
    return [None, *(by_token(prompt[i], *found[i], tokenizer) for i in range(1, len(prompt)))]


def _logprobs(seq: Sequence, tokenizer: Any, start: int = 0) -> list[dict[int, Logprob]]:
    """Of the output tokens from `start` on."""
    tokens = seq.token_ids[seq.num_prompt + start :]
    return [by_token(token, *entry, tokenizer) for token, entry in zip(tokens, seq.logprobs[start:], strict=True)]


class DeltaReader:
    """Tells what of a streamed request its reader has not seen yet.

    It looks at the request, not at steps, so nothing is lost while others drive the engine.

    Args:
        prompt_index: the request's place among the prompts of its stream.
    """

    def __init__(self, request: Request, tokenizer: Any, prompt_index: int) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._prompt_index = prompt_index
        self._tokens: dict[int, int] = {}
        self._characters: dict[int, int] = {}
        self._ended: set[int] = set()

    @property
    def done(self) -> bool:
        """Every output ended and was read to its end."""
        return len(self._ended) == len(self.request.sequences)

    def read(self) -> list[StreamDelta]:
        """One delta for every output that has something new."""
        return [delta for seq in self.request.sequences if (delta := self._delta(seq)) is not None]

    def _delta(self, seq: Sequence) -> StreamDelta | None:
        start, shown = self._tokens.get(seq.index, 0), self._characters.get(seq.index, 0)
        tokens = seq.token_ids[seq.num_prompt + start :]
        if seq.index in self._ended or not (tokens or seq.finished):
            return None
        self._tokens[seq.index], self._characters[seq.index] = start + len(tokens), seq.num_settled
        if seq.finished:
            self._ended.add(seq.index)
        return StreamDelta(
            prompt_index=self._prompt_index,
            index=seq.index,
            text=(seq.text or "")[shown : seq.num_settled],
            token_ids=tokens,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=None if self.request.params.logprobs is None else _logprobs(seq, self._tokenizer, start),
        )

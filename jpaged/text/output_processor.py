"""Turns a request's tokens into outputs and deltas, in the caller's thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from jpaged.outputs import BeamSearchSequence, CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenSpan
from jpaged.scheduling import Request
from jpaged.scheduling.top_tokens import TokenRanking
from jpaged.text.chat_answers import ChatAnswers
from jpaged.text.detokenizer import IncrementalDecoder, decoding
from jpaged.text.prompt import Conversation, Prompt
from jpaged.text.token_reader import NewTokens, Progress, TokenReader


class OutputProcessor:
    """Makes outputs of one model's tokens; any number of threads may do so at once.

    Args:
        tokenizer: a transformers tokenizer; None where the model has none.
        scored: whether outputs have a cumulative_logprob where the request asks for no log-probabilities.
        reasoning_parser: the format of thoughts in answers; None = the one that a chat template renders.

    Attributes:
        chats: reads the messages of answers.
    """

    def __init__(self, tokenizer: Any, *, scored: bool = True, reasoning_parser: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.scored = scored
        self.chats = ChatAnswers(tokenizer, reasoning_parser)
        self._texts: dict[int, str] = {}

    def whole(self, request: Request, request_id: str | None = None) -> RequestOutput:
        """Return the output of a request that finished; `request_id` is as in `OutputBuilder`."""
        builder = OutputBuilder(self, request, request_id)
        progress = TokenReader(request).read()
        assert progress is not None and progress.finished
        builder.add(progress)
        return builder.cumulative()

    def builder(self, request: Request, request_id: int | str | None = None) -> OutputBuilder:
        """Return the builder of a request's outputs while it runs; see `OutputBuilder`."""
        return OutputBuilder(self, request, request_id)

    def decoded(self, token: int) -> str | None:
        """Return the text of a token decoded alone, with the space it begins with; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        if token not in self._texts:
            self._texts[token] = _decoded(self.tokenizer, token)
        return self._texts[token]

    def logprobs(self, token: int, logprob: float, ranking: TokenRanking) -> dict[int, Logprob]:
        """Return a token and the most likely ones of its place, itself first; it is one of them or is added."""
        found = {token: Logprob(logprob, ranking.rank, self.decoded(token))}
        for rank, (other, value) in enumerate(zip(ranking.top_tokens, ranking.top_logprobs, strict=True), start=1):
            if other != token:
                found[other] = Logprob(value, rank, self.decoded(other))
        return found


class OutputBuilder:
    """Makes a request's outputs from the news of its `TokenReader`, in any thread.

    Args:
        request_id: the caller's own name for the request; None = the engine's number.
    """

    def __init__(self, processor: OutputProcessor, request: Request, request_id: int | str | None = None) -> None:
        self._processor = processor
        self._request = request
        self._name = request_id
        self._outputs = [
            _Output(processor, request, seq.index) for part in request.all_requests for seq in part.sequences
        ]
        self._finished = False
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._prompt_logprobs_told = False
        self._times: RequestMetrics | None = None
        self._times_of: Sequence[tuple[object, ...]] = []

    def add(self, progress: Progress) -> None:
        """Add new tokens and text."""
        for new in progress.outputs:
            self._outputs[new.index].add(new)
        self._finished = progress.finished

    def cumulative(self) -> RequestOutput:
        """Return everything so far. Lists are copied, so that later tokens do not change an output."""
        return self._output([output.cumulative() for output in self._outputs], self._scored_prompt())

    def delta(self) -> RequestOutput:
        """Return the changes since the last `delta`: only outputs with new tokens or text, and only their new parts.

        `cumulative_logprob` is that of all tokens so far; prompt_logprobs come once.
        """
        scored = None if self._prompt_logprobs_told else self._scored_prompt()
        self._prompt_logprobs_told |= scored is not None
        return self._output([delta for output in self._outputs if (delta := output.delta()) is not None], scored)

    def _output(
        self, outputs: list[CompletionOutput], prompt_logprobs: list[dict[int, Logprob] | None] | None
    ) -> RequestOutput:
        request = self._request
        return RequestOutput(
            request_id=request.request_id if self._name is None else self._name,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=self._finished,
            num_cached_tokens=request.num_cached_tokens,
            num_cached_by_tier=request.tier_tokens,
            kept_prefixes=request.kept_prefixes,
            metrics=self._metrics(),
            prompt_logprobs=prompt_logprobs,
            sequences=self._sequences(outputs),
        )

    def _metrics(self) -> RequestMetrics:
        """Return the request's times; most of its outputs share them, as they change a few times in its life."""
        known = [part.times for part in self._request.all_requests]
        if self._times is None or known != self._times_of:
            self._times, self._times_of = self._request.metrics(), known
        return self._times

    def _sequences(self, outputs: list[CompletionOutput]) -> list[BeamSearchSequence]:
        """Return the outputs of a beam search with the prompt before them; none of other requests."""
        if self._request.beam is None:
            return []
        tokenizer, prompt = self._processor.tokenizer, self._request.prompt_token_ids
        return [
            BeamSearchSequence(
                tokens=(tokens := prompt + output.token_ids),
                text=None if tokenizer is None else tokenizer.decode(tokens),
                cum_logprob=cast(float, output.cumulative_logprob),  # beams are ranked by it
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
            for output in outputs
        ]

    def _scored_prompt(self) -> list[dict[int, Logprob] | None] | None:
        """Return the prompt's log-probabilities, once all are known."""
        prompt, found = self._request.prompt_token_ids, self._request.prompt_logprobs
        wanted = self._request.params.prompt_logprobs is not None and self._prompt_logprobs is None
        if wanted and len(found) == len(prompt) - 1:
            scored = (self._processor.logprobs(prompt[i], *found[i]) for i in range(1, len(prompt)))
            self._prompt_logprobs = [None, *scored]
        return self._prompt_logprobs


class _Output:
    """One sequence's output as it grows, and how much of it went out as deltas."""

    def __init__(self, processor: OutputProcessor, request: Request, index: int) -> None:
        self._processor = processor
        self._detokenize = processor.tokenizer is not None and request.params.detokenize
        self._decoding = decoding(request.params)
        self._prompt = request.prompt_token_ids
        self._index = index
        self._scored = processor.scored or request.num_top > 0
        self._decoder: IncrementalDecoder | None = None
        self._pieces: list[str] = []  # of the text: adding to one text would copy it for every token
        self._next_piece = 0  # the first that did not go out as a delta
        self._num_characters = 0
        self._spans: list[TokenSpan] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if request.params.logprobs is None else []
        self._last: NewTokens | None = None
        self._told: NewTokens | None = None
        self._tokens_told = 0
        self._characters_told = 0
        self._spans_told = 0

    def add(self, new: NewTokens) -> None:
        if new.text is None:
            text = self._decode(new)
            self._spans = [] if self._decoder is None else self._decoder.spans
        else:
            text = new.text
            self._spans = new.spans
        self._pieces.append(text)
        self._num_characters += len(text)
        self._token_ids += new.token_ids
        if self._logprobs is not None:
            pairs = zip(new.token_ids, new.logprobs, strict=True)
            self._logprobs += (self._processor.logprobs(token, *entry) for token, entry in pairs)
        self._last = new

    def cumulative(self) -> CompletionOutput:
        text = "".join(self._pieces)
        if not self._next_piece:  # no delta went out: the next call joins two pieces, not all
            self._pieces = [text]
        return self._completion(text, 0, 0, 0, self._num_characters)

    def delta(self) -> CompletionOutput | None:
        if self._last is self._told:
            return None
        tokens, characters, spans = self._tokens_told, self._characters_told, self._spans_told
        end = self._num_characters
        if self._last is not None and self._last.finish_reason is None:  # the text of an added token is not cut
            end = next((span.start for span in self._spans[spans:] if span.start < end < span.end), end)
        text = "".join(self._pieces[self._next_piece :])
        text, rest = text[: end - characters], text[end - characters :]
        self._pieces[self._next_piece :] = [text, rest]
        self._next_piece += 1
        made = self._completion(text, tokens, characters, spans, end)
        self._told, self._tokens_told, self._characters_told = self._last, len(self._token_ids), end
        self._spans_told += len(made.added_token_spans)
        return made

    def _completion(
        self, text: str, first_token: int, first_character: int, first_span: int, end: int
    ) -> CompletionOutput:
        last = self._last
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=self._token_ids[first_token:],
            cumulative_logprob=self._cumulative_logprob,
            finish_reason=None if last is None else last.finish_reason,
            stop_reason=None if last is None else last.stop_reason,
            score=None if last is None else last.score,
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            added_token_spans=[
                TokenSpan(start - first_character, stop - first_character, token)
                for start, stop, token in self._spans[first_span:]
                if stop <= end
            ],
        )

    @property
    def _cumulative_logprob(self) -> float | None:
        if not self._scored:
            return None
        return 0.0 if self._last is None else self._last.cumulative_logprob

    def _decode(self, new: NewTokens) -> str:
        """Return the text that new tokens settle."""
        if not self._detokenize:
            return ""
        tokenizer, shown, options = self._processor.tokenizer, new.token_ids[: new.num_shown], self._decoding
        ended = new.finish_reason is not None
        if self._decoder is None and not hasattr(tokenizer, "backend_tokenizer"):
            return tokenizer.decode(shown, **options)  # all at once: it was not let into a stream
        if self._decoder is None:
            self._decoder = IncrementalDecoder(tokenizer, prompt=self._prompt, **options)
            if ended:
                return self._decoder.whole(shown)
        text = "".join(map(self._decoder.push, shown))
        return text + self._decoder.finish() if ended else text


def _decoded(tokenizer: Any, token: int) -> str:
    """Return the text of a token where it does not begin the whole text: many of SentencePiece's decoders drop the
    space there."""
    text: str = tokenizer.decode([token])
    piece = tokenizer.convert_ids_to_tokens(token)
    if not (isinstance(piece, str) and piece.startswith("\u2581")):
        return text
    twice = tokenizer.decode([token, token])
    return twice.removeprefix(text) if twice.startswith(text) else text


def refused(prompt: Prompt | Conversation, error: str) -> RequestOutput:
    """Return the output of a prompt that was not run."""
    if isinstance(prompt, Conversation):
        return RequestOutput(request_id=-1, prompt=None, prompt_token_ids=[], error=error)
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    ids = prompt.get("prompt_token_ids")
    tokens = list(ids) if isinstance(ids, Iterable) else []
    return RequestOutput(request_id=-1, prompt=prompt.get("prompt"), prompt_token_ids=tokens, error=error)

"""What a request gives back; the names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request in seconds on `time.monotonic`'s clock.

    Attributes:
        arrival_time: when it was added.
        first_scheduled_time: when its first tokens were scheduled.
        first_token_time: when its first sampled token reached the host.
        finished_time: when its last sequence ended.
        num_preemptions: how often its memory was taken back.
        num_swaps: how many of these moved its blocks to host memory; the others recomputed them.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0


@dataclass(frozen=True)
class Logprob:
    """What the model thought of a token at its place.

    Attributes:
        logprob: its log-probability under the model's own softmax.
        rank: its place among all tokens by probability, from 1.
        decoded_token: its text when decoded alone; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        cumulative_logprob: sum of the tokens' log-probabilities under the model's own softmax (temperature 1,
            before any truncation).
        score: of a beam: cumulative_logprob over its number of tokens to the power of length_penalty; else None.
        logprobs: for each token, itself and the most likely tokens of its place, by id; None unless asked for.
        stop_reason: the stop string or stop token that ended it; None for end-of-sequence or length.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    score: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt and everything generated for it.

    Attributes:
        request_id: the engine's number of it, or the name its caller gave to `AsyncLLM.generate`.
        finished: nothing more will come; always so but in what `AsyncLLM.generate` yields on the way.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        prompt_logprobs: for each prompt token, itself and the most likely tokens of its place, by id; None for the
            first, and in place of the list unless asked for or before the whole prompt was computed.
        error: why the request was refused (only with ``on_error="return"``); `outputs` is then empty.
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None


@dataclass(frozen=True)
class StreamDelta:
    """What is new of one output of a streamed prompt.

    Attributes:
        prompt_index: which of the stream's prompts.
        index: which of the prompt's outputs.
        text: the new text; all texts of an output together are its `CompletionOutput.text`. It may be empty while
            the tokens' text could still change: half a character, or what may be the beginning of a stop string.
        token_ids: the new tokens.
        finish_reason: why the output ended, in its last delta.
        stop_reason: as in `CompletionOutput`.
        logprobs: of the new tokens, as in `CompletionOutput`.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True)
class PinnedPrefix:
    """What `LLM.unpin` takes.

    Attributes:
        num_tokens: of the prompt's whole blocks.
    """

    seq_id: int
    num_tokens: int

"""Outputs of requests, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from jpaged.vllm_refusals import name_in, with_vllms_attributes

FinishReason = Literal["stop", "length", "abort"]

RESTORED = "the restored request "
"""Beginning of the stop_reason of a request of a saved state that this engine cannot run, as in a pool that is too
small: another engine may."""


@with_vllms_attributes
@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request in seconds on `time.monotonic`'s clock.

    Attributes:
        arrival_time: time when the request was added.
        first_scheduled_time: time when its first tokens were scheduled.
        first_token_time: time when its first sampled token reached the host.
        finished_time: time when its last sequence ended.
        num_preemptions: number of times that its memory was taken back.
        num_swaps: number of preemptions that moved its blocks to host memory; the others recomputed them.
        preempted: for each preemption its time and the time of the return to the batch; None before the return.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0
    preempted: tuple[tuple[float, float | None], ...] = ()

    @property
    def queued_ts(self) -> float:
        """Return `arrival_time`, under vLLM's name of the moment when the request was queued."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float:
        """Return `first_scheduled_time`; 0 before, as in vLLM."""
        return self.first_scheduled_time or 0.0

    @property
    def first_token_ts(self) -> float:
        """Return `first_token_time`; 0 before, as in vLLM."""
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        """Return `finished_time`, when the last token reached the host; 0 before the end."""
        return self.finished_time or 0.0

    @property
    def first_token_latency(self) -> float:
        """Return the seconds from the arrival to the first token; 0 before it."""
        return self.first_token_time - self.arrival_time if self.first_token_time is not None else 0.0


@dataclass(frozen=True)
class Logprob:
    """The model's log-probability of a token at its position.

    Attributes:
        logprob: the token's log-probability under the model's own softmax.
        rank: the token's place among all tokens by probability, from 1.
        decoded_token: the token's text when decoded alone, with the space it begins with; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class TokenSpan(NamedTuple):
    """Says where an added token of the tokenizer, such as a special one, stands in a text.

    Attributes:
        start, end: its characters in the text; equal if the text leaves it out.
        token_id: the token's id.
    """

    start: int
    end: int
    token_id: int


@dataclass(frozen=True)
class ToolCall:
    """A call of a function, as a model wrote it.

    Attributes:
        id: the call's id, to which its result refers: the model's own, or a random one.
        name: the function's name.
        arguments: its arguments, an object in JSON.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerMessage:
    """The message that an answer's text is.

    Attributes:
        content: the text without thoughts and calls; None where there are calls only.
        reasoning: the thought; None: there is none.
        tool_calls: the calls that are whole, in order.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the message as a conversation has it, for the next turn."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in self.tool_calls
            ]
        return made


@with_vllms_attributes
@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: the sequence's place among the request's outputs.
        text: the generated text.
        token_ids: the generated tokens.
        cumulative_logprob: sum of the tokens' log-probabilities under the model's own softmax (temperature 1,
            before any truncation); None if the request has no `logprobs` and the engine no ``cumulative_logprobs``.
        finish_reason: why the sequence ended; None while it goes on.
        stop_reason: the stop string or stop token that ended it, or why it was aborted where its structured_outputs
            could not go on; None for end-of-sequence or length.
        logprobs: a mapping by token id for each token: the token itself and the most likely ones of its place; None
            unless requested.
        score: cumulative_logprob of a beam, divided by its number of tokens to the power of length_penalty; None for
            other requests.
        added_token_spans: where in `text` the tokenizer's added tokens stand, special ones among them, in order. Text
            that only spells such a token has no span; nor has a stop token that the text does not show.
        message: the text as a message, in the last output of a chat: its content, thought and tool calls; None in
            others.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    score: float | None = None
    added_token_spans: list[TokenSpan] = field(default_factory=list)
    message: AnswerMessage | None = None

    def finished(self) -> bool:
        """Tell whether the sequence has ended, as vLLM's method of this name does."""
        return self.finish_reason is not None


@with_vllms_attributes
@dataclass(frozen=True)
class BeamSearchSequence:
    """One output of a beam search with the prompt before it, under vLLM's names.

    Attributes:
        tokens: tokens of the prompt and the output.
        text: text of all tokens, special tokens included; None without a tokenizer.
        cum_logprob: sum of the output's log-probabilities.
        finish_reason, stop_reason: see `CompletionOutput`.
    """

    tokens: list[int]
    text: str | None
    cum_logprob: float
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@with_vllms_attributes
@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt and everything generated for it.

    Attributes:
        request_id: the engine's number for the request, or the name its caller gave to `AsyncLLM.generate`.
        prompt: text of the prompt; None where tokens were given.
        prompt_token_ids: tokens of the prompt.
        outputs: the outputs, one for each sequence.
        finished: whether nothing more will come; False only in outputs that `AsyncLLM.generate` yields before the last.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        metrics: times and preemptions of the request.
        prompt_logprobs: a mapping by token id for each prompt token: the token itself and the most likely ones of its
            place. It is None for the first token; the list is None unless requested, or before the whole prompt was
            computed.
        sequences: the outputs of a beam search in vLLM's form; empty for other requests.
        error: why the request was refused (only with ``on_error="return"``); `outputs` is then empty.
        num_cached_by_tier: those of `num_cached_tokens` that were in no block of the pool, by tier: "ram", "disk".
        kept_prefixes: tokens of each prefix that the prompt's `cache_breakpoints` keep, with its seconds.
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
    sequences: list[BeamSearchSequence] = field(default_factory=list)
    num_cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    kept_prefixes: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class StreamDelta:
    """The new part of one output of a streamed prompt.

    Attributes:
        prompt_index: place of the prompt among the stream's prompts.
        index: place of the output among the prompt's outputs.
        text: the new text; all texts of an output together are its `CompletionOutput.text`. It may be empty while
            the tokens' text could still change: half a character, or what may be the beginning of a stop string.
        token_ids: the new tokens.
        finish_reason: why the output ended, in its last delta.
        stop_reason: see `CompletionOutput`.
        logprobs: log-probabilities of the new tokens, see `CompletionOutput`.
        added_token_spans: where in `text` the tokenizer's added tokens stand, see `CompletionOutput`.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    added_token_spans: list[TokenSpan] = field(default_factory=list)


@dataclass(frozen=True)
class SavedPrefix:
    """A prefix that `LLM.save_prefix` wrote.

    Attributes:
        path: its folder.
        num_tokens: tokens in the prompt's whole blocks, which were saved.
        num_bytes: size on disk.
    """

    path: str
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class SavedState:
    """A save of an engine's state, with its size and duration.

    Attributes:
        path: folder of this save; the previous save is deleted.
        num_requests: number of requests in it.
        num_bytes: bytes written.
        pause_seconds: how long the engine paused while the state was copied, including the wait for the step in flight.
        seconds: duration of the whole save; the engine went on while files were written.
    """

    path: str
    num_requests: int
    num_bytes: int
    pause_seconds: float
    seconds: float


@dataclass(frozen=True)
class PinnedPrefix:
    """A prefix that `LLM.pin_prefix` pinned; `LLM.unpin` takes it.

    Attributes:
        seq_id: the engine's id of the pin.
        num_tokens: tokens in the prompt's whole blocks, which are kept.
        name: the caller's own name for it; None = it has none.
        seconds_left: how long it stayed from when this was made; None = until it is unpinned.
    """

    seq_id: int
    num_tokens: int
    name: str | None = None
    seconds_left: float | None = None


@with_vllms_attributes
@dataclass(frozen=True)
class EmbeddingOutput:
    """One vector of a prompt.

    Attributes:
        embedding: the vector's numbers.
    """

    embedding: list[float] = field(repr=False)

    @property
    def hidden_size(self) -> int:
        """Return how many numbers the vector has."""
        return len(self.embedding)


@with_vllms_attributes
@dataclass(frozen=True)
class ClassificationOutput:
    """The probabilities of a model's classes for a prompt.

    Attributes:
        probs: the probability of each class. They add up to 1, unless the model is for several labels or has one class:
            then each class has its own probability.
        logits: the values from which the probabilities are computed.
    """

    probs: list[float]
    logits: list[float]

    @property
    def num_classes(self) -> int:
        """Return how many classes there are."""
        return len(self.probs)


@with_vllms_attributes
@dataclass(frozen=True)
class ScoringOutput:
    """The log-probability or class probability of a prompt, or the similarity of two.

    Attributes:
        score: a log-probability, a cosine or a probability, see `jpaged.LLM.score`.
    """

    score: float


T = TypeVar("T", EmbeddingOutput, ClassificationOutput, ScoringOutput)


@with_vllms_attributes
@dataclass(frozen=True)
class PoolingRequestOutput(Generic[T]):
    """A prompt with its vector, classes or score.

    Attributes:
        request_id: the engine's number for the request; for a pair of two requests, that of the second prompt.
        outputs: the vector, the classes or the score.
        prompt_token_ids: tokens of the prompt; of a pair, of both.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        finished: True.
        num_cached_by_tier: as of `RequestOutput`.
    """

    request_id: int | str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    num_cached_by_tier: Mapping[str, int] = field(default_factory=dict)


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = partial(name_in, __name__)

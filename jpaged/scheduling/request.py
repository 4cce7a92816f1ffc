"""Requests and the sequences they generate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from jpaged.grammar import Grammar
from jpaged.outputs import FinishReason, RequestMetrics
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.beam import BeamSearch
from jpaged.scheduling.step import TokenRanking


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One generated stream.

    Attributes:
        seq_id: unique over the engine's life; the memory manager's key.
        index: its place among the request's outputs.
        token_ids: prompt and generated tokens the host has seen.
        num_pending: sampled tokens still on the device (0 or 1: the engine runs ahead by one step).
        num_computed: tokens whose KV was written, counting the step in flight.
        capacity: tokens its blocks hold without a new one; 0 asks the memory manager again.
        slot: its row in the engine's persistent batch arrays, -1 while it is not running.
        pending_row: where its pending token lies in the last step's samples.
        parent: the sequence it is to be forked from; None once it has block tables of its own.
        fork_at: tokens both have in common: it is forked when its parent has computed them.
        text: the text so far, where it is built token by token; None where nobody needs it before the end.
        num_settled: leading characters of `text` that no later token can take back.
        grammar: what its text must follow.
        candidates: of a beam, its most likely next tokens while other beams' are awaited.
        score: of a finished beam.
        logprobs: each generated token's log-probability and ranking, for requests that ask for logprobs.
    """

    seq_id: int
    index: int
    token_ids: list[int]
    num_prompt: int
    num_pending: int = 0
    num_computed: int = 0
    capacity: int = 0
    slot: int = -1
    pending_row: int = -1
    parent: Sequence | None = None
    fork_at: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    text: str | None = None
    num_settled: int = 0
    candidates: TokenRanking | None = None
    score: float | None = None
    logprobs: list[tuple[float, TokenRanking]] = field(default_factory=list)
    grammar: Grammar | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens the sequence has, the pending one included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        """Generated tokens, the pending one included."""
        return len(self.token_ids) + self.num_pending - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(eq=False)
class Request:
    """What a user asked for. Its sequences are scheduled and preempted together (paper, section 4.5).

    Attributes:
        seed: of output 0; see `seed_of`.
        max_total_tokens: prompt + most tokens it may generate, within max_model_len.
        stop_ids: tokens that end a sequence: end-of-sequence (unless ignored) and stop_token_ids.
        eos_ids: the ones among them that are the model's own (finish without a stop_reason).
        priority: lower is served first; None where requests are served in order of arrival.
        cache_salt: keeps its blocks apart in the prefix cache from those of other salts.
        streamed: somebody reads its text while it is generated.
        prompt_logprobs: of each prompt token once it was scored, for requests that ask for it.
        bad_words: token sequences that its output cannot hold.
        encoder_tokens: of its images or audio, for models with cross-attention; the salt must name them.
        allowed_mask: packed bits of the tokens it may draw, as in `LogitEdits.mask`; None = all.
        beam: the beam search it is; its sequences are the beams, best first.
        arrival_number: its place in the order of arrival, given by the scheduler.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    sequences: list[Sequence]
    prompt: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    streamed: bool = False
    prompt_logprobs: dict[int, tuple[float, TokenRanking]] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_mask: np.ndarray | None = None
    beam: BeamSearch | None = None
    encoder_tokens: int = 0
    arrival_number: int = -1
    status: Status = Status.WAITING
    num_cached_tokens: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0

    @property
    def live(self) -> list[Sequence]:
        """Sequences that still generate."""
        return [s for s in self.sequences if s.finish_reason is None]

    def seed_of(self, seq: Sequence) -> int:
        """The seed of one output's random stream, 64 bits: ``seed + index * 0x9E3779B97F4A7C15`` modulo 2**64.

        Output 0 draws what a request of one output with this seed draws; the constant is SplitMix64's.
        """
        return (self.seed + seq.index * 0x9E3779B97F4A7C15) % 2**64

    @property
    def num_top(self) -> int:
        """Most likely tokens that come back beside each sampled one; 0 = nothing but the token."""
        if self.beam is not None:
            return self.beam.num_candidates
        return 0 if self.params.logprobs is None else max(1, self.params.logprobs)

    @property
    def edits_logits(self) -> bool:
        """Its logits may be changed before a token is chosen."""
        params = self.params
        edited = params.penalised or params.logit_bias or params.min_tokens or params.structured_outputs
        return bool(edited or self.bad_words or self.allowed_mask is not None)

    @property
    def needs_host(self) -> bool:
        """The host must see each token before the next can be drawn, so that its sequences never run ahead."""
        return self.beam is not None or self.params.structured_outputs is not None

    @property
    def needs_text(self) -> bool:
        """Its text is built token by token, not at the end."""
        return self.params.detokenize and (self.streamed or bool(self.params.stop_strings))

    def text_tokens(self, seq: Sequence, start: int = 0) -> list[int]:
        """A sequence's output tokens from `start` that its text is made of: the token that ended it is none unless
        asked for."""
        ended = seq.finish_reason == "stop" and seq.token_ids[-1] in self.stop_ids
        stopped = ended and not self.params.include_stop_str_in_output
        return seq.token_ids[seq.num_prompt + start : len(seq.token_ids) - stopped]

    def metrics(self) -> RequestMetrics:
        return RequestMetrics(
            self.arrival_time,
            self.first_scheduled_time,
            self.first_token_time,
            self.finished_time,
            self.num_preemptions,
            self.num_swaps,
        )

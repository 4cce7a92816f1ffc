"""Requests and the sequences they generate, and when a sequence ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np

from jpaged.cache_retention import CacheRetention
from jpaged.outputs import FinishReason, RequestMetrics
from jpaged.pooling_params import Pooling
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.axis_positions import AxisPositions, places_of
from jpaged.scheduling.beam import BeamSearch
from jpaged.scheduling.hooks import StopSearch, TokenRules
from jpaged.scheduling.top_tokens import TokenRanking


class Status(Enum):
    """The stage of a request's life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One generated stream.

    Attributes:
        seq_id: unique over the engine's life; the memory manager's key.
        index: the sequence's place among the request's outputs.
        token_ids: prompt and generated tokens the host has seen.
        num_pending: sampled tokens still on the device (0 or 1: the engine runs ahead by one step). Where drafts are
            verified, 1 stands for the one that is sure to come.
        num_computed: tokens whose KV was written, counting the step in flight but not the drafts in it.
        capacity: tokens its blocks hold without a new one; 0 asks the memory manager again.
        row: row of the engine's persistent batch arrays that it has, -1 while it is not running.
        pending_row: row of the last step's samples that holds its pending token.
        needs_host: whether the host must see the pending token before the next can be planned: drafts are being
            verified, or may be worth making after it.
        awaits_mask: whether the mask of its next token is being made in a thread, see `Constrained`.
        is_slow: whether its masks outlast a step, so that it does not run ahead.
        parent: the sequence to fork it from; None once it has its own block tables.
        fork_at: tokens both have in common: it is forked when its parent has computed them.
        grammar: says which tokens may come next; None = all.
        stop_search: finds stop strings; None = it has none.
        candidates: most likely next tokens of a beam while those of other beams are awaited.
        score: score of a finished beam; None for other sequences.
        logprobs: each generated token's log-probability and ranking, for requests that ask for logprobs.
        places: where its tokens lie on several axes of positions; None where all are text.
    """

    seq_id: int
    index: int
    token_ids: list[int]
    num_prompt: int
    num_pending: int = 0
    num_computed: int = 0
    capacity: int = 0
    row: int = -1
    pending_row: int = -1
    needs_host: bool = False
    awaits_mask: bool = False
    is_slow: bool = False
    parent: Sequence | None = None
    fork_at: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    candidates: TokenRanking | None = None
    score: float | None = None
    logprobs: list[tuple[float, TokenRanking]] = field(default_factory=list)
    grammar: TokenRules | None = None
    stop_search: StopSearch | None = None
    places: AxisPositions | None = None

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the sequence has, the pending one included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        """Return how many tokens it generated, the pending one included."""
        return len(self.token_ids) + self.num_pending - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(eq=False)
class Request:
    """A request of a user. Its sequences are scheduled and preempted together (paper, section 4.5).

    Attributes:
        seed: seed of output 0's random stream; `seed_of` makes those of the others.
        max_total_tokens: prompt + most tokens it may generate, within max_model_len.
        stop_ids: tokens that end a sequence: end-of-sequence (unless ignored) and stop_token_ids.
        eos_ids: the stop_ids that are the model's own end-of-sequence (they finish without a stop_reason).
        priority: lower is served first; None where requests are served in order of arrival.
        cache_salt: keeps its blocks apart in the prefix cache from those of other salts.
        name: the caller's own name for it; None = it has none. The engine does not read it.
        prompt: text of the prompt, for the output; the engine does not read it.
        prompt_logprobs: log-probability and ranking of each prompt token, by position, once it was scored; for requests
            that ask for them.
        bad_words: token sequences that its output cannot hold.
        encoder_tokens: number of tokens of an encoder whose KV its sequences' tables have; the salt must name them.
        asks: contents that it asks for in addition to text, by their kinds, see `jpaged.scheduling.held`.
        held: what it holds of them in the pool, by their kinds; empty while it does not run.
        kept_tokens: leading tokens of the prompt that are to be found as a prefix once they are computed, see
            `MemoryManager.add`; 0 = wherever the layers see fit.
        retention: what it asks of the prefix cache; None = nothing.
        prefix_ends: numbers of leading tokens of the prompt after which later prompts may part from it, the likeliest
            first: ends of messages, and where the caller says so.
        allowed_mask: packed bits of the tokens it may draw, as in `TokenMasks.mask`; None = all.
        beam: the beam search of a beam request, whose sequences are the beams, best first; None for others.
        compact_placement: whether its blocks go where they open fewest large pages, see `MemoryManager.pack`.
        runs_exclusively: whether it could not go on although no other request ran, because its blocks lay scattered. It
            is scheduled again with compact placement and the pool to itself.
        tier_tokens: those of `num_cached_tokens` that were found in each tier below the pool.
        arrival_number: place in the order of arrival, given by the scheduler.
        pooling: how the hidden states of its prompt become one vector; None = no vector.
        pooled: the parts of that vector that chunks of its prompt made, by their first position: the position after
            their last, and a vector. A chunk that is computed again replaces its part.
        pause_times: times at which it was preempted and at which it was back in the batch, alternating.
        edits: the edits of logits that it asks for, once a sampler looked: the scheduler does not read them.
        most_pages: large pages that it takes at most, see `MemoryManager.pages_alone`; None for a restored one,
            of which it is not known.
        overflow_requests: requests for the outputs that exceed the number of sequences that may run at once. They are
            queued right after it, and are read and aborted together with it.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    sequences: list[Sequence]
    name: str | None = None
    prompt: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_logprobs: dict[int, tuple[float, TokenRanking]] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_mask: np.ndarray | None = None
    beam: BeamSearch | None = None
    encoder_tokens: int = 0
    kept_tokens: int = 0
    retention: CacheRetention | None = None
    prefix_ends: tuple[int, ...] = ()
    asks: dict[str, Any] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    pooling: Pooling | None = None
    pooled: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    compact_placement: bool = False
    runs_exclusively: bool = False
    arrival_number: int = -1
    overflow_requests: list[Request] = field(default_factory=list)
    status: Status = Status.WAITING
    num_cached_tokens: int = 0
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0
    pause_times: list[float] = field(default_factory=list)
    edits: tuple[Any, ...] | None = field(default=None, init=False, repr=False)
    most_pages: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        places = places_of(self.asks)
        for seq in self.sequences:
            seq.places = places

    @property
    def all_requests(self) -> list[Request]:
        """Return the request and those for its later outputs."""
        return [self, *self.overflow_requests]

    @cached_property
    def is_plain(self) -> bool:
        """True if a sequence's next token takes only a row of the step and what the request holds: it has no pooled
        vector, beam or rules."""
        return not (self.pooling or self.needs_host or self.has_rules)

    @property
    def kept_prefixes(self) -> list[tuple[int, float]]:
        """Return the tokens of each prefix that it asks to keep, as far as the last one can be, with its seconds."""
        if not self.kept_tokens or self.retention is None:
            return []
        return [(min(position, self.kept_tokens), seconds) for position, seconds in self.retention.breakpoints]

    @property
    def computes_whole_prompt(self) -> bool:
        """Return whether every token of the prompt has to be computed, even those in the prefix cache."""
        return self.params.prompt_logprobs is not None or self.pooling not in (None, "last")

    @property
    def most_computed(self) -> int:
        """Return the most tokens of a sequence that need memory: one that draws a single token never computes it."""
        draws_one = self.params.max_tokens == 1 and self.beam is None and self.params.n == 1
        return len(self.prompt_token_ids) if draws_one else self.max_total_tokens

    @property
    def pauses(self) -> list[tuple[float, float | None]]:
        """Return when its memory was taken back and when it was in the batch again; None while it is not."""
        return list(zip_longest(self.pause_times[::2], self.pause_times[1::2]))

    def pause(self) -> None:
        """Note that its memory is taken back."""
        self.num_preemptions += 1
        self.pause_times.append(time.monotonic())

    def end_pause(self) -> None:
        """Note that it is in the batch again, if its memory had been taken back."""
        if len(self.pause_times) % 2:
            self.pause_times.append(time.monotonic())

    @property
    def live(self) -> list[Sequence]:
        """Return the sequences that still generate."""
        return [s for s in self.sequences if s.finish_reason is None]

    def seed_of(self, seq: Sequence) -> int:
        """Return the seed of one output's random stream, 64 bits: ``seed + index * 0x9E3779B97F4A7C15`` modulo 2**64.

        Output 0 draws what a request of one output with this seed draws; the constant is SplitMix64's.
        """
        return (self.seed + seq.index * 0x9E3779B97F4A7C15) % 2**64

    @cached_property
    def num_top(self) -> int:
        """Return how many most likely tokens come back with each sampled one; 0 = only the token."""
        if self.beam is not None:
            return self.beam.num_candidates
        return 0 if self.params.logprobs is None else max(1, self.params.logprobs)

    @property
    def has_rules(self) -> bool:
        """Tell whether its sequences have rules that say which tokens may come, see `Sequence.grammar`."""
        return self.params.structured_outputs is not None or self.params.thinking_token_budget is not None

    @property
    def needs_host(self) -> bool:
        """Tell whether the host must see each token before the next can be planned, so that its sequences never run
        ahead: a beam search may go on from another beam."""
        return self.beam is not None

    def hides_last(self, seq: Sequence, finish_reason: FinishReason | None) -> bool:
        """Tell whether the last token of a sequence that ended for this reason is a stop token that its text leaves
        out."""
        stopped = finish_reason == "stop" and seq.token_ids[-1] in self.stop_ids
        return stopped and not self.params.include_stop_str_in_output

    @property
    def times(self) -> tuple[float | None, float | None, float | None, int, int]:
        """Return the changing inputs of `metrics`, by which a caller sees whether it changed."""
        pauses = len(self.pause_times)
        return self.first_scheduled_time, self.first_token_time, self.finished_time, self.num_swaps, pauses

    def metrics(self) -> RequestMetrics:
        """Return its times, from its first token to the end of its last output, and preemptions."""
        parts = self.all_requests
        ends = [part.finished_time for part in parts if part.finished_time is not None]
        return RequestMetrics(
            self.arrival_time,
            self.first_scheduled_time,
            self.first_token_time,
            max(ends) if len(ends) == len(parts) else None,
            sum(part.num_preemptions for part in parts),
            sum(part.num_swaps for part in parts),
            tuple(pause for part in parts for pause in part.pauses),
        )


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
    end-of-sequence leaves a stop_reason. That of a grammar that cannot be followed any further is its error; where its
    mask is still to be made, its end shows later, see `Constrained.follow`.
    """
    token_ids, grammar = seq.token_ids, seq.grammar
    token = token_ids[-1]
    if token in request.stop_ids and len(token_ids) - seq.num_prompt >= request.params.min_tokens:
        return "stop", None if token in request.eos_ids else token
    if grammar is not None and grammar.is_ready and (stop := end_of(grammar)) is not None:
        return stop
    if len(token_ids) >= request.max_total_tokens:
        return "length", None
    return None


def end_of(rules: TokenRules) -> Stop | None:
    """Say why the text ends at rules that are up to its last token; None where it goes on."""
    if rules.error is not None:
        return "abort", rules.error
    return ("stop", None) if rules.complete else None

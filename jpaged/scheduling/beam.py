"""Beam search on the host: chooses the candidates that go on, collects those that ended, and decides when to stop.

Rules and scores are those of transformers' `generate(num_beams=k, num_return_sequences=k)`. Nothing here knows of
blocks: `beam_sequences` applies the choices to the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from jpaged.outputs import FinishReason
from jpaged.sampling_params import BeamSearchParams
from jpaged.scheduling.top_tokens import TokenRanking


class Continuation(NamedTuple):
    """A beam of the next step: beam number `parent` of this one and one more token."""

    parent: int
    token: int


class Hypothesis(NamedTuple):
    """A finished output: its tokens, the sum of their log-probabilities, and that over length ** length_penalty."""

    token_ids: list[int]
    logprob: float
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """The search for one request.

    Args:
        max_tokens: most tokens of an output here, within the model's limit.
        eos_ids: tokens that end an output; none when they are ignored.

    Attributes:
        logprobs: log-probabilities of the running beams, best first; a single one before the first step.
        finished: the best `beam_width` outputs that ended, best first.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_ids: frozenset[int]) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.eos_ids = eos_ids
        self.begin()

    def begin(self) -> None:
        """Go back to the prompt, a single beam, and forget all outputs."""
        self.logprobs = [0.0]
        self.finished: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """Return how many most likely tokens are wanted of each beam: enough for `beam_width` to go on even if all
        others end."""
        return max(2, 1 + len(self.eos_ids)) * self.params.beam_width

    def advance(self, outputs: Seq[list[int]], candidates: Seq[TokenRanking]) -> list[Continuation]:
        """Go one step: return the `beam_width` beams that go on, best first; none once the search is over.

        A candidate that ends counts as finished only if it is among the best `beam_width`.

        Args:
            outputs: tokens that each beam has generated, best beam first.
            candidates: each beam's most likely next tokens. Only the first beam counts before the first step.
        """
        width, length = self.params.beam_width, len(outputs[0]) + 1
        best = sorted(
            (
                (sofar + logprob, Continuation(beam, token))
                for beam, (sofar, ranking) in enumerate(zip(self.logprobs, candidates, strict=False))
                for token, logprob in zip(ranking.top_tokens, ranking.top_logprobs, strict=True)
            ),
            key=lambda candidate: -candidate[0],
        )[: self.num_candidates]
        running = []
        for place, (logprob, (beam, token)) in enumerate(best):
            is_eos = token in self.eos_ids
            if not is_eos and length < self.max_tokens:
                running.append((logprob, Continuation(beam, token)))
            elif place < width:
                score = logprob / length**self.params.length_penalty
                reason: FinishReason = "stop" if is_eos else "length"
                self.finished.append(Hypothesis([*outputs[beam], token], logprob, score, reason))
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[:width]
        self.logprobs = [logprob for logprob, _ in running[:width]]
        return [] if self._is_over(length) else [beam for _, beam in running[:width]]

    def _is_over(self, length: int) -> bool:
        """Tell whether no running beam, now of `length` tokens, could still improve on the finished outputs."""
        params = self.params
        if not self.logprobs:
            return True
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        return self.logprobs[0] / length**params.length_penalty <= self.finished[-1].score

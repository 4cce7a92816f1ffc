"""What the scheduler hands to the device: plain facts, no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float, Int

if TYPE_CHECKING:
    from jpaged.memory import BlockCopy, HostBlock, SwapCopy
    from jpaged.scheduling.request import Request, Sequence


class Chunk(NamedTuple):
    """Tokens ``[start, start + length)`` of a sequence to compute.

    A named tuple, not a dataclass: hundreds are made every step.

    Attributes:
        source_row: row of the last step's samples that holds the chunk's last token, which the host has not
            seen; -1 when the host has all tokens.
        tables: the sequence's block tables, one a group, when they changed since its last chunk, else None.
    """

    seq: Sequence
    start: int
    length: int
    source_row: int
    tables: list[list[int]] | None


class Sample(NamedTuple):
    """A token to draw for `seq` after the last token of `chunk`."""

    request: Request
    seq: Sequence
    chunk: Chunk


class PromptScore(NamedTuple):
    """A prompt token, by its position, whose log-probability a request asks for."""

    request: Request
    position: int


class TopTokens(NamedTuple):
    """What the device says beside a step's sampled tokens, one row a sample, where a request asked for it.

    Attributes:
        ranks: the sampled token's place among all by probability, from 1.
        tokens, logprobs: the most likely tokens, best first; at least as many as the greediest request asked for.
    """

    ranks: Int[np.ndarray, " samples"]
    tokens: Int[np.ndarray, "samples top"]
    logprobs: Float[np.ndarray, "samples top"]

    def row(self, sample: int, most: int) -> TokenRanking:
        """One sample's, cut to the `most` asked for."""
        tokens, logprobs = self.tokens[sample, :most].tolist(), self.logprobs[sample, :most].tolist()
        return TokenRanking(int(self.ranks[sample]), tokens, logprobs)


class TokenRanking(NamedTuple):
    """A token's rank from 1, and the most likely tokens at its place with their log-probabilities, best first."""

    rank: int
    top_tokens: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True)
class ScheduledStep:
    """One iteration. Chunks of one token (decodes) come before longer ones.

    Attributes:
        copies: block copies the device makes before the chunks run.
        preempted: requests whose memory was taken back to make room.
        dropped: host blocks whose content nobody will ask for.
        swap_out: blocks the device copies to host memory before anything else of the step.
        swap_in: blocks it copies back after that and before `copies`.
        scored: chunks of requests that ask for prompt_logprobs.
    """

    chunks: list[Chunk] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    dropped: list[HostBlock] = field(default_factory=list)
    swap_out: list[SwapCopy] = field(default_factory=list)
    swap_in: list[SwapCopy] = field(default_factory=list)
    scored: list[tuple[Request, Chunk]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_top(self) -> int:
        """Most likely tokens to find beside each sampled one: what the greediest request asks for."""
        return max((request.num_top for request, _, _ in self.samples), default=0)

    @property
    def num_decodes(self) -> int:
        """Leading chunks of one token."""
        return sum(chunk.length == 1 for chunk in self.chunks)

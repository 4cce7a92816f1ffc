"""The device's rankings of tokens, as facts for the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class TopTokens(NamedTuple):
    """The most likely tokens of each sample of a step, one row per sample, if a request needs them.

    Attributes:
        ranks: place of each sampled token among all tokens by probability, from 1.
        tokens, logprobs: the most likely tokens, best first; at least as many as any request of the step needs.
    """

    ranks: Int[np.ndarray, " samples"]
    tokens: Int[np.ndarray, "samples top"]
    logprobs: Float[np.ndarray, "samples top"]

    def row(self, sample: int, most: int) -> TokenRanking:
        """Return one sample's ranking, cut to its `most` best tokens."""
        tokens, logprobs = self.tokens[sample, :most].tolist(), self.logprobs[sample, :most].tolist()
        return TokenRanking(int(self.ranks[sample]), tokens, logprobs)


class TokenRanking(NamedTuple):
    """A token's rank from 1, and the most likely tokens at its place with their log-probabilities, best first."""

    rank: int
    top_tokens: list[int]
    top_logprobs: list[float]

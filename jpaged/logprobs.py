"""Log-probabilities as users read them: by token id, with text."""

from __future__ import annotations

from typing import Any

from jpaged.outputs import Logprob
from jpaged.scheduling.step import TokenRanking


def by_token(token: int, logprob: float, ranking: TokenRanking, tokenizer: Any) -> dict[int, Logprob]:
    """A token and the most likely ones of its place, itself first; it is one of them or comes beside them."""

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, None if tokenizer is None else tokenizer.decode([token]))

    found = {token: entry(token, logprob, ranking.rank)}
    for rank, (other, value) in enumerate(zip(ranking.top_tokens, ranking.top_logprobs, strict=True), start=1):
        if other != token:
            found[other] = entry(other, value, rank)
    return found

"""Interfaces for grammars and stop-string searches, which inspect each new token.

The scheduler calls them and does not know their rules; `jpaged.text` implements both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int


class TokenRules(Protocol):
    """Says which tokens may come next.

    Attributes:
        waits: whether the mask after the next token depends on that token; otherwise every token may come there.
        complete: whether nothing but end-of-sequence can come.
        error: why the rules cannot be followed any further; None while they can.
    """

    waits: bool
    complete: bool
    error: str | None

    @property
    def mask(self) -> Int[np.ndarray, " words"] | None:
        """Return packed bits of these tokens, as in `TokenMasks.mask`; None where every token may come."""

    def accept(self, token: int) -> None:
        """Advance by a token of the mask."""

    def restart(self, tokens: Sequence[int]) -> None:
        """Follow `tokens` from the beginning; tokens accepted before are forgotten."""

    def copy(self) -> TokenRules:
        """Return independent rules at the same place."""


def allowed_ahead(rules: TokenRules, tokens: Sequence[int]) -> int:
    """Return how many of `tokens`, one after the other, the rules allow to come next. The rules stay where they are."""
    return _follow(rules, tokens)[0]


def mask_after(rules: TokenRules, tokens: Sequence[int]) -> Int[np.ndarray, " words"] | None:
    """Return the mask of the tokens that may follow `tokens`; None where these are not all allowed, or every token may.
    The rules stay."""
    if not tokens:
        return rules.mask
    allowed, ahead = _follow(rules, tokens)
    return ahead.mask if allowed == len(tokens) and not ahead.complete and ahead.error is None else None


def _follow(rules: TokenRules, tokens: Sequence[int]) -> tuple[int, TokenRules]:
    ahead = rules.copy()
    for number, token in enumerate(tokens):
        mask = ahead.mask
        if ahead.complete or ahead.error is not None or not (mask is None or mask[token // 32] >> (token % 32) & 1):
            return number, ahead
        ahead.accept(token)
    return len(tokens), ahead


class StopSearch(Protocol):
    """Says when the tokens, taken together, end the sequence."""

    def restart(self) -> None:
        """Go back to before the first token."""

    def push(self, tokens: Iterable[int]) -> str | None:
        """Take the next tokens; return the stop string that they complete, or None when the sequence goes on."""

    def finish(self) -> str | None:
        """End the search: no more tokens come. Return the stop string that the last ones complete after all, or
        None."""

"""Interfaces for grammars and stop-string searches, which inspect each new token.

The scheduler calls them and does not know their rules; `jpaged.text` implements both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int


class Masks(Protocol):
    """Makes the masks of an engine's grammars; see `jpaged.text.masks`."""

    def make(self, grammars: Sequence[Any], /) -> None:
        """Make the masks of several `TokenRules.grammar` after the tokens they accepted, in one call."""

    def begin(self, grammar: Any, /) -> Future[None]:
        """Make one in a thread; its rules must not be used before that is done."""


class TokenRules(Protocol):
    """Says which tokens may come next. What follows from the mask is made when it is first read."""

    @property
    def mask(self) -> Int[np.ndarray, " words"] | None:
        """Return packed bits of these tokens, as in `TokenMasks.mask`; None where every token may come."""

    @property
    def waits(self) -> bool:
        """Tell whether the mask after the next token depends on that token; otherwise every token may come there."""

    @property
    def complete(self) -> bool:
        """Tell whether nothing but end-of-sequence can come."""

    @property
    def error(self) -> str | None:
        """Return why the rules cannot be followed any further; None while they can."""

    @property
    def is_ready(self) -> bool:
        """Tell whether the mask was made."""

    @property
    def is_slow(self) -> bool:
        """Tell whether making a mask outlasts a step."""

    @property
    def masks(self) -> Masks | None:
        """Return what makes masks for many at once; None where no mask takes long, as without a `grammar`."""

    @property
    def grammar(self) -> Any:
        """Return what `masks` takes; its `look_ahead` makes the mask at once, in this thread. None: there is none."""

    def accept(self, token: int) -> None:
        """Advance by a token of the mask."""

    def forced(self) -> Sequence[int]:
        """Return tokens that come next, one after the other, whatever is drawn: each is the only one of its mask."""

    def restart(self, tokens: Sequence[int]) -> None:
        """Follow `tokens` from the beginning; tokens accepted before are forgotten."""

    def copy(self) -> TokenRules:
        """Return independent rules at the same place."""


def accept(rules: TokenRules, token: int) -> None:
    """Advance rules by a token, and make their mask."""
    rules.accept(token)
    make_mask(rules)


def make_mask(rules: TokenRules) -> None:
    """Make the mask after the accepted tokens, in this thread."""
    if rules.grammar is not None:
        rules.grammar.look_ahead()


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
        if ahead.complete or ahead.error is not None or not _allows(ahead.mask, token):
            return number, ahead
        accept(ahead, token)
    return len(tokens), ahead


def _allows(mask: Int[np.ndarray, " words"] | None, token: int) -> bool:
    """Tell whether a token may come. Those that stand for items may have ids after all that can be drawn."""
    return mask is None or (token < 32 * len(mask) and bool(mask[token // 32] >> (token % 32) & 1))


class StopSearch(Protocol):
    """Says when the tokens, taken together, end the sequence."""

    def restart(self) -> None:
        """Go back to before the first token."""

    def push(self, tokens: Iterable[int]) -> str | None:
        """Take the next tokens; return the stop string that they complete, or None when the sequence goes on."""

    def finish(self) -> str | None:
        """End the search: no more tokens come. Return the stop string that the last ones complete after all, or
        None."""

"""What a grammar allows, less what else a request forbids."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Int

from jpaged.text.grammar import Grammar
from jpaged.text.token_constraints import packed_bits


class Limits:
    """What a request forbids beside its grammar.

    Args:
        vocab_size: number of the model's logits.
        allowed: packed bits of the only tokens that may come; None = all.
        bad_words: token sequences that the output cannot hold.
        never: tokens that never come: end-of-sequence where it is ignored.
        late: tokens that do not come before `min_tokens`.
        endings: tokens that a grammar allows where its text is complete.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Int[np.ndarray, " words"] | None,
        bad_words: Sequence[tuple[int, ...]],
        never: Collection[int],
        late: Collection[int],
        min_tokens: int,
        endings: Collection[int],
    ) -> None:
        always = np.full(-(-vocab_size // 32), -1, np.int32) if allowed is None else allowed
        banned = [*never, *(word[0] for word in bad_words if len(word) == 1)]
        self._always = always & ~packed_bits(banned, vocab_size)
        self._early = self._always & ~packed_bits(late, vocab_size)
        self._min_tokens = min_tokens
        self._phrases = [word for word in bad_words if len(word) > 1]
        self.endings = packed_bits(endings, vocab_size)

    def mask(self, tokens: Sequence[int]) -> Int[np.ndarray, " words"]:
        """Return packed bits of what may come after `tokens`, which were generated."""
        mask = self._early if len(tokens) < self._min_tokens else self._always
        lasts = [last for *before, last in self._phrases if tokens[-len(before) :] == before]
        if lasts:
            mask = mask.copy()
            for token in lasts:
                mask[token // 32] &= np.int32(~np.uint32(1 << token % 32).astype(np.int32))
        return mask


class CombinedRules:
    """Follows one sequence's tokens: a grammar and limits, whose masks are combined on the host.

    Where they leave no token, the text has ended if the grammar's is complete there, and cannot go on if not.

    Attributes:
        mask, complete, error: what `Grammar` has under these names, with the limits in it.

    Raises:
        ValueError: the grammar and the limits leave no token for the first place.
    """

    def __init__(self, grammar: Grammar, limits: Limits) -> None:
        self._grammar = grammar
        self._limits = limits
        self._tokens: list[int] = []
        self._combine()
        if not self.mask.any():
            raise ValueError(
                "structured_outputs, allowed_token_ids, bad_words, min_tokens and ignore_eos together leave no token "
                "that the output could begin with"
            )

    def copy(self) -> CombinedRules:
        """Return independent rules at the same place."""
        twin = object.__new__(CombinedRules)
        twin._grammar, twin._limits, twin._tokens = self._grammar.copy(), self._limits, self._tokens.copy()
        twin._combine()
        return twin

    def accept(self, token: int) -> None:
        """Go on by a token of the mask."""
        self._grammar.accept(token)
        self._tokens.append(token)
        self._combine()

    def restart(self, tokens: Sequence[int]) -> None:
        """Follow `tokens` from the beginning, whatever was accepted before."""
        self._grammar.restart(tokens)
        self._tokens = list(tokens)
        self._combine()

    def _combine(self) -> None:
        self.mask = self._grammar.mask & self._limits.mask(self._tokens)
        self.complete, self.error = self._grammar.complete, self._grammar.error
        if self.complete or self.error is not None or self.mask.any():
            return
        if (self._grammar.mask & self._limits.endings).any():
            self.complete = True
        else:
            self.error = "structured_outputs needs a token here that allowed_token_ids, bad_words or min_tokens forbid"

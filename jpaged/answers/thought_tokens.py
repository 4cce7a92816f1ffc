"""Counts the tokens of an output's thought."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from jpaged.answers.reader import AnswerReader


class ThoughtTokens:
    """Counts the tokens of one output's thought, its marks included.

    If the closing mark is not one token and stop strings hold text back, tokens are counted that came before the mark's
    text was released.

    Args:
        reader: reads the output's text.
        end: the token that ends a thought; None if there is none.
        decode: decodes tokens to text.
    """

    def __init__(self, reader: AnswerReader, end: int | None, decode: Callable[[Sequence[int]], str]) -> None:
        self._reader = reader
        self._end = end
        self._decode = decode
        self._num_read = 0
        self._num_tokens = 0
        self._ended = False

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """Count more of the output. The reader has to have read `text` before."""
        before, self._num_read = self._num_read, self._num_read + len(text)
        if self._ended:
            return
        length = self._reader.thought_length
        if self._end is not None and self._end in token_ids:
            self._num_tokens += token_ids.index(self._end) + 1
        elif length is None:
            self._num_tokens += len(token_ids)
            return
        else:
            self._num_tokens += self._within(token_ids, length - before)
        self._ended = True

    def _within(self, token_ids: Sequence[int], length: int) -> int:
        """Return how many of the tokens make up the first `length` characters of their text."""
        if len(token_ids) < 2:
            return len(token_ids)
        counts = range(1, len(token_ids))
        return 1 + bisect_left(counts, length, key=lambda count: len(self._decode(token_ids[:count])))

    @property
    def total(self) -> int:
        """Return the tokens so far; 0 if the output did not begin with a thought."""
        return 0 if self._reader.thought_length == 0 else self._num_tokens

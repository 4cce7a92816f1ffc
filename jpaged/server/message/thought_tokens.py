"""Counts the tokens of a thought, which the usage of an answer tells."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from jpaged.server.message.reasoning import ThinkReader


class ThoughtTokens:
    """Counts the tokens of one output's thought, its marks included.

    Where the mark of its end is no token of its own, and stop strings hold text back, those tokens count too that came
    before the mark's text did.

    Args:
        reader: reads the output's text.
        end: the token that ends a thought; None where there is none.
        decode: makes text of tokens.
    """

    def __init__(self, reader: ThinkReader, end: int | None, decode: Callable[[Sequence[int]], str]) -> None:
        self._reader = reader
        self._end = end
        self._decode = decode
        self._num_read = 0
        self._num_tokens = 0
        self._ended = False

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """Take in more of the output, of which the reader has read the text already."""
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
        """Return how many of the tokens have the first so many characters of their text."""
        if len(token_ids) < 2:
            return len(token_ids)
        counts = range(1, len(token_ids))
        return 1 + bisect_left(counts, length, key=lambda count: len(self._decode(token_ids[:count])))

    @property
    def total(self) -> int:
        """Return the tokens so far; 0 where the output did not begin with a thought."""
        return 0 if self._reader.thought_length == 0 else self._num_tokens

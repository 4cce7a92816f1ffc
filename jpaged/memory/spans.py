"""Tokens whose ids do not say what they stand for: those of an image have one id, whatever the image shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple


class TokenSpan(NamedTuple):
    """The tokens of one image in a sequence.

    Attributes:
        start: position of the first.
        length: how many there are.
        digest: names the image, and how it was prepared; equal for equal images only.
        whole: whether the tokens see each other, so that no chunk and no prefix hit may end among them.
    """

    start: int
    length: int
    digest: bytes
    whole: bool

    @property
    def stop(self) -> int:
        """Return the position behind the last."""
        return self.start + self.length


def marks(spans: Sequence[TokenSpan], start: int, stop: int) -> bytes:
    """Return what distinguishes the tokens [`start`, `stop`) beside their ids: each image that lies among them, and
    which part of it does."""
    return b"".join(
        span.digest + (start - span.start).to_bytes(8, "little", signed=True)
        for span in spans
        if span.start < stop and start < span.stop
    )


def may_end(length: int, spans: Sequence[TokenSpan]) -> bool:
    """Tell whether a prefix or chunk may end after `length` tokens."""
    return not any(span.whole and span.start < length < span.stop for span in spans)


def last_end(length: int, spans: Sequence[TokenSpan], step: int = 1) -> int:
    """Return the longest length, at most `length` and a multiple of `step`, after which a prefix or chunk may end."""
    while True:
        length = length // step * step
        inside = next((span for span in spans if span.whole and span.start < length < span.stop), None)
        if inside is None:
            return length
        length = inside.start


def in_common(some: Sequence[TokenSpan], others: Sequence[TokenSpan], length: int) -> int:
    """Return how many of `length` leading tokens with equal ids stand for the same in two sequences."""
    for one, other in zip_longest(some, others):
        if one != other:
            return min(length, *(span.start for span in (one, other) if span is not None))
    return length

"""An image in a prompt: which tokens stand for it, and what its encoder takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jpaged.memory import TokenSpan


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image, prepared for its encoder.

    Attributes:
        start, length: the tokens of the prompt that take its features' place.
        digest: names the image's pixels and how they were prepared.
        features: number of vectors that the encoder makes of it; the tokens take them in order.
        arrays: the encoder's arguments by name, without a batch axis.
        whole: whether its tokens see each other, so that one step computes them together.
    """

    start: int
    length: int
    digest: bytes
    features: int
    arrays: Mapping[str, np.ndarray]
    whole: bool

    @property
    def stop(self) -> int:
        """Return the position behind its last token."""
        return self.start + self.length

    @cached_property
    def span(self) -> TokenSpan:
        """Return what the memory is told of it."""
        return TokenSpan(self.start, self.length, self.digest, self.whole)

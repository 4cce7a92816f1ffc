"""An image in a prompt: which tokens stand for it, and what its encoder takes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jpaged.memory import TokenSpan


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image, prepared for its encoder.

    Attributes:
        start, length: the tokens of the prompt that take its features' place.
        digest: names the image's pixels, how they were prepared, and the prompt's salt, if it has one.
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

    def salted(self, salt: str) -> PromptImage:
        """Return the same image under a name that prompts of other salts do not know."""
        name = hashlib.blake2b(self.digest + salt.encode(), digest_size=32, person=b"jpaged-salted").digest()
        return replace(self, digest=name)

    @cached_property
    def span(self) -> TokenSpan:
        """Return what the memory is told of it."""
        return TokenSpan(self.start, self.length, self.digest, self.whole)

"""Defines what requests ask for in addition to text, as it lies on the host: items such as images, and adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from jpaged.memory import Adapters, ImageFeatures, TokenSpan


@dataclass(frozen=True, eq=False)
class PromptItem:
    """An image, or frames of a video that are encoded together, prepared for its encoder.

    Attributes:
        start, length: the tokens of the prompt that stand for it.
        digest: names the item's content, how it was prepared, and the prompt's salt, if it has one.
        features: number of vectors that the encoder makes of it.
        arrays: the encoder's arguments by name, without a batch axis.
        whole: whether its tokens see each other, so that one step computes them together.
        parts: the items that follow one another without text in between, where the tokens after them read them all
            (cross-attention); this one then stands for them together, and has no `arrays`. () = it is one item.
        modality: what it is, e.g. ``"image"`` or ``"video"``.
        takes: which feature takes the place of each of its tokens; -1 for a token that stays text, as the one that ends
            a row of Pixtral's patches. None = the tokens take the features in order.
        offsets: where each of its tokens lies on each axis of positions, from where the item begins; see
            `AxisPositions`. None = its tokens follow one another like text.
        advance: how far it moves the position of the token after it; None = by its length.

    Raises:
        ValueError: `takes` or `offsets` are not of `length` tokens, or a token takes a feature that there is not.
    """

    start: int
    length: int
    digest: bytes
    features: int
    arrays: Mapping[str, np.ndarray]
    whole: bool
    parts: tuple[PromptItem, ...] = ()
    modality: str = "image"
    takes: Int[np.ndarray, " length"] | None = None
    offsets: Int[np.ndarray, "length axes"] | None = None
    advance: int | None = None

    def __post_init__(self) -> None:
        for name, array in (("takes", self.takes), ("offsets", self.offsets)):
            if array is not None and len(array) != self.length:
                raise ValueError(f"{name} are those of {len(array)} tokens, and the item has {self.length}")
        if self.takes is not None and self.length and not -1 <= self.takes.min() <= self.takes.max() < self.features:
            raise ValueError(
                f"takes={self.takes.min()}..{self.takes.max()} are not among the item's {self.features} features"
            )

    @property
    def each(self) -> tuple[PromptItem, ...]:
        """Return the images that it stands for, in order; their features follow one another."""
        return self.parts or (self,)

    @property
    def stop(self) -> int:
        """Return the position after its last token."""
        return self.start + self.length

    def taken(self, start: int, stop: int) -> Int[np.ndarray, " tokens"]:
        """Return which feature each of the tokens [`start`, `stop`), by position, takes; -1 = none."""
        first, last = start - self.start, stop - self.start
        return np.arange(first, last) if self.takes is None else self.takes[first:last]

    def consumed(self, stop: int) -> int:
        """Return how many features, the first ones, no token from position `stop` on takes."""
        if self.takes is None:
            return stop - self.start
        later = self.takes[stop - self.start :]
        return int(min(later[later >= 0], default=self.features))

    def seen(self, positions: Int[np.ndarray, " tokens"]) -> Int[np.ndarray, " tokens"]:
        """Return how many features, the first ones, tokens at these positions read, none of which lies after the next
        image."""
        return sum((np.where(positions >= image.start, image.features, 0) for image in self.each), np.zeros(1, int))

    def salted(self, salt: str) -> PromptItem:
        """Return the same image under a name that prompts of other salts do not know."""
        name = hashlib.blake2b(self.digest + salt.encode(), digest_size=32, person=b"jpaged-salted").digest()
        return replace(self, digest=name)

    @cached_property
    def span(self) -> TokenSpan:
        """Return its tokens and digest, as the prefix cache needs them."""
        return TokenSpan(self.start, self.length, self.digest, self.whole)


def joined(images: Sequence[PromptItem]) -> tuple[PromptItem, ...]:
    """Return images of a prompt, in order, with one for all that follow one another without text in between."""
    runs: list[list[PromptItem]] = []
    for image in images:
        if runs and runs[-1][-1].stop == image.start:
            runs[-1].append(image)
        else:
            runs.append([image])
    return tuple(run[0] if len(run) == 1 else _together(run) for run in runs)


def _together(run: Sequence[PromptItem]) -> PromptItem:
    name = hashlib.blake2b(b"".join(image.digest for image in run), digest_size=32, person=b"jpaged-together")
    features = sum(item.features for item in run)
    length = run[-1].stop - run[0].start
    return PromptItem(run[0].start, length, name.digest(), features, {}, run[0].whole, tuple(run))


class SavedAdapter(NamedTuple):
    """Names the adapter of a request that was read from a saved state, until it is found.

    Attributes:
        name, digest: see `Adapter`; the digest in hexadecimal digits.
    """

    name: str
    digest: str


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank adapter, as it lies on the host.

    Attributes:
        name: the name by which requests ask for it.
        digest: names its content: equal for equal matrices and scales only.
        blocks: content of its blocks in the pool, on each shard.
        site_blocks: how many of them, in order, each of the model's adapted sites has; 0 where it adapts none.
    """

    name: str
    digest: bytes
    blocks: UInt8[np.ndarray, "shards blocks bytes"] = field(repr=False)
    site_blocks: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Return how many blocks of the pool it takes."""
        return self.blocks.shape[1]

    @property
    def salt(self) -> tuple[str, str]:
        """Return the part of a prefix salt that separates KV computed with it from other KV in the prefix cache."""
        return self.name, self.digest.hex()


def asks_for(images: Sequence[PromptItem] = (), adapter: Adapter | None = None) -> dict[str, Any]:
    """Return what a request asks for, by its kind."""
    asks: dict[str, Any] = {}
    if images:
        asks[ImageFeatures.kind] = tuple(images)
    if adapter is not None:
        asks[Adapters.kind] = adapter
    return asks

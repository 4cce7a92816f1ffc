"""Features of images (Jenga's vision-embedding cache): no sequence's table holds them, see `jpaged.memory.images`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jpaged.memory.policies.base import UNBOUNDED, Policy


@dataclass(frozen=True)
class ImageFeatures(Policy):
    """Vectors that an encoder made of images, which tokens take the place of once and layers never read again.

    They belong to images and not to sequences, so a sequence's table is always empty and a prefix of any length is
    valid without them. Admission counts the blocks of the largest image of a request beside everything else.

    Attributes:
        most: features of the largest image of the request; 0 = it has none.

    Raises:
        ValueError: when `most` is negative.
    """

    most: int = 0

    names_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.most < 0:
            raise ValueError(f"most={self.most} features must not be negative")

    def for_request(self, encoder_tokens: int, prompt_tokens: int | None = None) -> Policy:
        return ImageFeatures(encoder_tokens)

    def num_blocks(self, length: int, block_size: int) -> int:
        return 0

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(0),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        return range(UNBOUNDED)

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return -(-self.most // block_size)

    def alignment(self, block_size: int) -> int:
        return 1

    def capacity(self, num_blocks: int, block_size: int, num_slots: int) -> int:
        return UNBOUNDED

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        return range(0)

    def full_blocks(self, num_known: int, num_computed: int, block_size: int) -> int:
        return 0

    def longest_prefix(self, length: int, block_size: int) -> int:
        return length

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return 0

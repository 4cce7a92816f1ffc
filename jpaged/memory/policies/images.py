"""What encoders make of images (Jenga's vision-embedding cache): no sequence's table holds it, see
`jpaged.memory.images`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jpaged.memory.policies.base import Policy
from jpaged.memory.policies.no_table import NoTable


@dataclass(frozen=True)
class ImageFeatures(NoTable):
    """What an encoder made of images: vectors that tokens take the place of once, or K and V that tokens behind the
    image read.

    It belongs to images and not to sequences, so a sequence's table is always empty and a prefix of any length is
    valid without it. Admission counts the blocks of the largest image of a request beside everything else.

    Attributes:
        most: features of the largest image of the request; 0 = it has none.
        stays: whether tokens read it as long as they see the image (cross-attention), and not once.

    Raises:
        ValueError: when `most` is negative.
    """

    most: int = 0
    stays: bool = False

    def __post_init__(self) -> None:
        if self.most < 0:
            raise ValueError(f"most={self.most} features must not be negative")

    def for_request(self, encoder_tokens: int, prompt_tokens: int | None = None) -> Policy:
        return replace(self, most=encoder_tokens)

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return -(-self.most // block_size)

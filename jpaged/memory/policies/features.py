"""Blocks whose content is no token of a sequence: images, adapters, and the encoder's K and V of cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from jpaged.memory.policies.base import UNBOUNDED, Policy


class NoTable(Policy):
    """Blocks that are in no sequence's table: it is always empty, and a prefix of any length is valid without it."""

    names_tokens: ClassVar[bool] = False

    def num_blocks(self, length: int, block_size: int) -> int:
        return 0

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(0),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        return range(UNBOUNDED)

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


@dataclass(frozen=True)
class ImageFeatures(NoTable):
    """An encoder's output for images: vectors that replace tokens once, or K and V that tokens after the image read.

    It belongs to images and not to sequences, so a sequence's table is always empty and a prefix of any length is
    valid without it. Admission counts the blocks of a request's largest image in addition to all others.

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


@dataclass(frozen=True)
class Adapters(NoTable):
    """The matrices of low-rank adapters: an adapter's blocks are shared by all requests that run with it.

    They belong to no sequence. A request's demand names its adapter's blocks in addition to those of its sequences.
    """

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return 0


@dataclass(frozen=True)
class CrossAttention(Policy):
    """KV of the request's encoder tokens: written with its first token, read by all until the end.

    Block ``i`` covers encoder tokens, not the sequence's. The request's salt identifies them, so it has
    to name the images; a prefix of any length is valid if all blocks are cached, else none.

    Raises:
        ValueError: when `encoder_tokens` is negative.
    """

    encoder_tokens: int = 0

    names_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.encoder_tokens < 0:
            raise ValueError(f"encoder_tokens={self.encoder_tokens} must not be negative")

    def for_request(self, encoder_tokens: int, prompt_tokens: int | None = None) -> Policy:
        return CrossAttention(encoder_tokens)

    def num_blocks(self, length: int, block_size: int) -> int:
        return -(-self.encoder_tokens // block_size) if length else 0

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(self.num_blocks(length, block_size)),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        return range(UNBOUNDED if all(is_hit) else 1)

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return self.num_blocks(length, block_size)

    def alignment(self, block_size: int) -> int:
        return 1

    def capacity(self, num_blocks: int, block_size: int, num_slots: int) -> int:
        return UNBOUNDED if num_blocks >= self.num_blocks(1, block_size) else 0

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        return range(self.num_blocks(stop, block_size)) if start == 0 else range(0)

    def full_blocks(self, num_known: int, num_computed: int, block_size: int) -> int:
        return self.num_blocks(num_known, block_size)

    def longest_prefix(self, length: int, block_size: int) -> int:
        return length

    def prefix_end(self, block: int, block_size: int) -> int:
        return 0  # every prefix needs it

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return super().filled_tokens(block, self.encoder_tokens, block_size) if length else 0

"""Blocks whose content is no token of a sequence: images, adapters, and the encoder's K and V of cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jpaged.memory.policies.base import UNBOUNDED, Policy


class NoTable(Policy):
    """Blocks that are in no sequence's table: it is always empty, and a prefix of any length is valid without it.

    They belong to contents that requests hold while they run, see `jpaged.memory.shared_blocks`. What makes a
    request's demand counts them in addition to the blocks of its sequences.

    Attributes:
        kind: what the blocks hold; unique among the layer groups of a pool.
        always_stays: whether a content that no request holds stays cached without prefix caching too.
        is_saved: whether the blocks are part of a saved state; where they are not, all is computed again.
        goes_to_tiers: whether host memory and disk keep what the pool evicts.
    """

    names_tokens: ClassVar[bool] = False
    kind: ClassVar[str]
    always_stays: ClassVar[bool] = False
    is_saved: ClassVar[bool] = True
    goes_to_tiers: ClassVar[bool] = True

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return 0

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

    Attributes:
        most: features of the largest image where the model says it, by which a pool is sized; 0 = it does not.
        stays: whether tokens read it as long as they see the image (cross-attention), and not once.
        patches, work: what encoding an image costs: `work` tokens for each entry of its array `patches`, or for each of
            its features where it has no such array.
        rounds: layers of each part that the encoder may stop after; () = it encodes an image as a whole.

    Raises:
        ValueError: when `most` is negative.
    """

    kind: ClassVar[str] = "images"
    most: int = 0
    stays: bool = False
    patches: str = field(default="", repr=False)  # saved states compare what is shown
    work: float = field(default=1.0, repr=False)
    rounds: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.most < 0:
            raise ValueError(f"most={self.most} features must not be negative")

    def for_request(self, encoder_tokens: int, prompt_tokens: int | None = None) -> Policy:
        return replace(self, most=0)

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return -(-self.most // block_size)


@dataclass(frozen=True)
class Adapters(NoTable):
    """The matrices of low-rank adapters: an adapter's blocks are shared by all requests that run with it.

    Attributes:
        places: different adapters that a step can have.
    """

    kind: ClassVar[str] = "adapters"
    always_stays: ClassVar[bool] = True
    is_saved: ClassVar[bool] = False
    goes_to_tiers: ClassVar[bool] = False  # the host has them, or reads their folders, see `max_cpu_loras`
    places: int = field(default=1, repr=False)  # saved states compare what is shown


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
    reads_encoder: ClassVar[bool] = True

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

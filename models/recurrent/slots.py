"""Places heads with the columns that they share, so that each tensor shard has whole ones.

A `HeadLayout` serves here too: a slot is what several heads share (a group's B and C in Mamba-2, a query and a key in
DeltaNet), and its heads. There are as many slots as shards or a multiple; what is shared is there in every slot that
needs it, and padding heads have weights of zero, which leave nothing in their state and give nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.model_api import HeadLayout, head_layout

from ..lazy_concat import LazyConcat, zeros
from ..weights import Converter


@dataclass(frozen=True)
class Rows:
    """Says which rows of a checkpoint's tensor go to each slot.

    Attributes:
        first: by slot, the first rows of its runs; -1 = a run of zeros.
        width: rows of a run.
        tensor: which of a converter's tensors they are of.
    """

    first: tuple[tuple[int, ...], ...]
    width: int
    tensor: int = 0


@dataclass(frozen=True)
class Slots:
    """Lays `heads` heads, of which equally many neighbours share one of `shared` things, over tensor shards.

    Attributes:
        layout: the slots; its KV heads are what is shared.
    """

    heads: int
    shared: int
    layout: HeadLayout

    @classmethod
    def of(cls, heads: int, shared: int, shards: int, said: str) -> Slots:
        """Lay them over `shards` shards.

        Args:
            said: the config's fields, for the error.

        Raises:
            ValueError: the heads do not divide.
        """
        if shared < 1 or heads < 1 or heads % shared:
            raise ValueError(f"{said}: {heads} heads do not divide over {shared}")
        return cls(heads, shared, head_layout(heads, shared, shards))

    @property
    def number(self) -> int:
        """Return the number of slots."""
        return self.layout.kv_heads

    @property
    def share(self) -> int:
        """Return the heads of a slot, padding included."""
        return self.layout.q_per_kv

    @property
    def placed_heads(self) -> int:
        """Return the number of heads, padding included."""
        return self.number * self.share

    def of_heads(self, width: int, start: int = 0, tensor: int = 0) -> Rows:
        """Return the rows of each slot's heads, `width` a head, where all heads follow one another from row `start`."""
        first = tuple(tuple(-1 if h < 0 else start + h * width for h in heads) for heads in self.layout.q_of_slot)
        return Rows(first, width, tensor)

    def of_shared(self, width: int, start: int = 0, tensor: int = 0) -> Rows:
        """Return the rows that each slot shares, `width` per slot; see `of_heads`."""
        first = tuple((-1 if s < 0 else start + s * width,) for s in self.layout.kv_of_slot)
        return Rows(first, width, tensor)

    def of_heads_by_shared(self, width: int, start: int, stride: int, tensor: int = 0) -> Rows:
        """Return the rows of each slot's heads, `width` a head, where the heads that share something follow one another
        from row `start` of its `stride` rows."""
        each = self.heads // self.shared
        first = tuple(
            tuple(-1 if h < 0 else h // each * stride + start + h % each * width for h in heads)
            for heads in self.layout.q_of_slot
        )
        return Rows(first, width, tensor)

    def of_shared_by_shared(self, width: int, start: int, stride: int, tensor: int = 0) -> Rows:
        """Return the rows that each slot shares, in the layout of `of_heads_by_shared`."""
        return Rows(tuple((-1 if s < 0 else s * stride + start,) for s in self.layout.kv_of_slot), width, tensor)


def columns(*parts: Rows) -> Converter:
    """Return a converter of matrices [rows, inputs] -> [inputs, columns], slot by slot the rows of all `parts`.

    Biases, [rows] each, -> [columns].
    """
    by_slot = rows(*parts)
    return lambda *tensors: by_slot(*tensors).T


def rows(*parts: Rows) -> Converter:
    """Return a converter of tensors [rows, ...] -> [rows, ...], slot by slot the rows of all `parts`."""

    def convert(*tensors: np.ndarray) -> LazyConcat:
        return LazyConcat(
            [piece for slot in zip(*(part.first for part in parts), strict=True) for piece in of(slot, tensors)], 0
        )

    def of(slot: Sequence[tuple[int, ...]], tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        pieces = []
        for part, first in zip(parts, slot, strict=True):
            stored = tensors[part.tensor]
            for row in first:
                nothing = zeros((part.width, *stored.shape[1:]), stored.dtype)
                pieces.append(nothing if row < 0 else stored[row : row + part.width])
        return pieces

    return convert


def of_channels(convert: Converter) -> Converter:
    """Return the converter of a convolution's weights as checkpoints store them, [channels, 1, width], from that of
    [channels, width]."""
    return lambda stored: convert(stored[:, 0])

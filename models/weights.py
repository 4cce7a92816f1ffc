"""Turns a checkpoint's tensors into parameters, in NumPy.

PyTorch stores a linear layer as [out, in]; here the contracted dimension comes first. Each function below
returns a converter for `WeightSource.convert`. Results are views of what went in, or joined of such views when they are
sliced: the copy of a device's part is the only one made. Padding (slots of a head layout, MLP columns, vocabulary rows)
is zero, so it adds nothing to any dot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jpaged.model_api import HeadLayout, padded

from .lazy_concat import LazyConcat, lines, zeros

Converter = Callable[..., "np.ndarray | LazyConcat"]


def as_stored(array: np.ndarray) -> np.ndarray:
    """Return the array itself: norm scales, output biases and everything else that needs no change."""
    return array


@dataclass(frozen=True)
class Padded:
    """The size of an axis of which a checkpoint stores `stored`, and parameters hold `size`, so that all shards are
    alike.

    Attributes:
        count: of the things on the axis that may not be cut: columns, or heads.
        shards: how many shards they are split over.
        each: the length of each.
        unit: a shard has a multiple of so many of them.
    """

    count: int
    shards: int
    each: int = 1
    unit: int = 1

    @property
    def stored(self) -> int:
        return self.count * self.each

    @property
    def size(self) -> int:
        return padded(self.count, self.shards * self.unit) * self.each


Size = int | Padded
"""The size of an axis; a number is both what is stored and what is held."""


def _sized(array: np.ndarray | LazyConcat, axis: int, size: Size) -> np.ndarray | LazyConcat:
    """Check that `axis` has the stored size, and pad it with zeros at its end.

    Raises:
        ValueError: another size is stored.
    """
    stored, wanted = (size, size) if isinstance(size, int) else (size.stored, size.size)
    if array.shape[axis] != stored:
        raise ValueError(f"{array.shape[axis]} numbers along an axis where the config says {stored}")
    return _resized(array, axis, wanted)


def _resized(array: np.ndarray | LazyConcat, axis: int, size: int) -> np.ndarray | LazyConcat:
    """Pad with zeros at the end of `axis`; return the array itself when it has that size already."""
    missing = size - array.shape[axis]
    if missing == 0:
        return array
    if missing < 0:
        raise ValueError(f"axis {axis} of {array.shape} is longer than {size}")
    padding = zeros((*array.shape[:axis], missing, *array.shape[axis + 1 :]), array.dtype)
    return LazyConcat([array, padding], axis)


def pad_axis(axis: int, size: Size) -> Converter:
    """Return a converter that pads `axis` with zeros."""
    return lambda array: _sized(array, axis, size)


def pad_axes(first: int, *sizes: Size) -> Converter:
    """Return a converter that pads the axes from number `first` on to these sizes with zeros."""

    def convert(array: np.ndarray) -> np.ndarray | LazyConcat:
        padded: np.ndarray | LazyConcat = array
        for axis, size in enumerate(sizes, first % array.ndim):
            padded = _sized(padded, axis, size)
        return padded

    return convert


def pad_rows(rows: Size) -> Converter:
    """Return a converter [stored, ...] -> [rows, ...], for biases of padded columns."""
    return pad_axis(0, rows)


def vocab_rows(vocab_size: int, rows: int) -> Converter:
    """Return a converter [vocab_size, ...] -> [rows, ...] that pads a vocabulary's table, so that shards are alike.

    Tables with fewer rows than `vocab_size` are refused: the tokens without a row would look like padding.
    """

    def convert(table: np.ndarray) -> np.ndarray | LazyConcat:
        if table.shape[0] < vocab_size:
            raise ValueError(f"vocab_size={vocab_size} in the config, but only {table.shape[0]} rows are stored")
        return _resized(table, 0, rows)

    return convert


def linear(inputs: Size, outputs: Size) -> Converter:
    """Return a converter [out, in] -> [inputs, outputs]."""
    return lambda array: _sized(_sized(array.T, 0, inputs), 1, outputs)


def _in_turn(gate: np.ndarray, up: np.ndarray, axis: int, width: Padded) -> LazyConcat:
    """Pad both along `axis`, and join each shard's part of gate with its part of up."""
    return _all_in_turn((gate, up), axis, width)


def _all_in_turn(arrays: Sequence[np.ndarray], axis: int, width: Padded) -> LazyConcat:
    """Pad each along `axis`, and join the shards' parts, each shard's of all arrays in turn."""
    shapes = [array.shape for array in arrays]
    if len(set(shapes)) > 1 or shapes[0][axis] != width.stored:
        raise ValueError(f"{' and '.join(map(str, shapes))} do not make {width.stored} columns each")
    borders = range(0, width.size + 1, width.size // width.shards)
    parts = [lines(array, axis, *part) for part in pairwise(borders) for array in arrays]
    return LazyConcat([piece for part in parts for piece in part], axis)


def fuse_gate_up(width: Padded) -> Converter:
    """Return a converter of gate and up, [mlp, embed] each, -> [embed, 2 * width], padded; each shard's gate columns,
    then its up's.

    Biases, [mlp] each, -> [2 * width].
    """
    return lambda gate, up: _in_turn(gate, up, 0, width).T


def split_gate_up(width: Padded) -> Converter:
    """Return a converter [experts, embed, gate and up columns] -> [experts, embed, 2 * width], the columns as in
    `fuse_gate_up`."""

    def convert(both: np.ndarray) -> LazyConcat:
        half = both.shape[2] // 2
        return _in_turn(both[:, :, :half], both[:, :, half:], 2, width)

    return convert


def inputs_first(convert: Converter) -> Converter:
    """Return a converter of [experts, out, in] that applies `convert`, which takes [experts, in, out]."""
    return lambda array: convert(array.swapaxes(1, 2))


def split_in_turn(parts: int, width: Padded) -> Converter:
    """Return a converter of `parts` matrices in one, [parts * size, embed], -> [embed, parts * width], padded; each
    shard's columns of the first, then of the second and so on.

    A bias, [parts * size], -> [parts * width].
    """

    def convert(stored: np.ndarray) -> LazyConcat:
        return _all_in_turn(np.split(stored, parts), 0, width).T

    return convert


def split_alternating(width: Padded) -> Converter:
    """Return the converter of `split_gate_up` for gate and up columns that alternate; biases, [experts, columns], ->
    [experts, 2 * width]."""
    return lambda both: _in_turn(both[..., ::2], both[..., 1::2], both.ndim - 1, width)


def stack_gate_up(width: Padded) -> Converter:
    """Return a converter of every expert's gate and up in turn, [mlp, embed] each, -> [experts, embed, 2 * width], the
    columns as in `fuse_gate_up`."""

    def convert(*tensors: np.ndarray) -> LazyConcat:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return LazyConcat([_in_turn(gate.T[None], up.T[None], 2, width) for gate, up in pairs], 0)

    return convert


def stack_linear(*, inputs: Size | None = None, outputs: Size | None = None) -> Converter:
    """Return a converter of every expert's matrix, [out, in] each, -> [experts, inputs, outputs], padded to the sizes
    that are given."""

    def placed(matrix: np.ndarray) -> np.ndarray | LazyConcat:
        turned: np.ndarray | LazyConcat = matrix.T[None]
        for axis, size in ((1, inputs), (2, outputs)):
            turned = turned if size is None else _sized(turned, axis, size)
        return turned

    return lambda *tensors: LazyConcat([placed(tensor) for tensor in tensors], 0)


def fuse_qkv(
    layout: HeadLayout,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    rotates_neighbours: bool = False,
    gated: bool = False,
    rotated: int | None = None,
) -> Converter:
    """Return a converter that puts q [num_heads * head_dim, embed] and k, v [num_kv_heads * head_dim, embed] in the
    columns of one matrix.

    The result is [embed, kv_heads * (q_per_kv + 2) * head_dim], slot by slot the queries, the K and the V. Biases
    come and go without the embed dimension. Layers that read another's KV have only q, and the result is
    [embed, kv_heads * q_per_kv * head_dim]. With `rotates_neighbours` the rows of each head of q and k are reordered,
    the even ones first, so that the pairs a rotation turns lie half a head apart; their products stay the same. Rows
    from `rotated` on, which no rotation turns, keep their places. With
    `gated` q holds each head's queries and then its gates, [num_heads * 2 * head_dim, embed], and a slot its gates
    after its queries.
    """

    def rows(head: np.ndarray, rotates: bool) -> list[np.ndarray]:
        return pairs_apart(head, rotated) if rotates and rotates_neighbours else [head]

    def convert(q: np.ndarray, *kv_pair: np.ndarray) -> LazyConcat:
        embed = q.shape[1:]
        queries = q.reshape(num_heads, head_dim * (1 + gated), *embed)
        pair = [a.reshape(num_kv_heads, head_dim, *embed) for a in kv_pair]
        padding = zeros((head_dim, *embed), q.dtype)
        pieces: list[np.ndarray] = []
        for kv, heads in zip(layout.kv_of_slot, layout.q_of_slot, strict=True):
            for head in heads:
                mine = padding if head < 0 else queries[head][:head_dim] if gated else queries[head]
                pieces += rows(mine, True)
            if gated:
                pieces += [queries[head][head_dim:] if head >= 0 else padding for head in heads]
            for number, stored in enumerate(pair):
                pieces += rows(stored[kv] if kv >= 0 else padding, number == 0)
        return LazyConcat(pieces, 0).T

    return convert


def pairs_apart(head: np.ndarray, rotated: int | None = None) -> list[np.ndarray]:
    """Return a head's rows with the even ones of its first `rotated` first, then the odd ones, then the rest."""
    end = head.shape[0] if rotated is None else rotated
    return [head[:end:2], head[1:end:2], *([head[end:]] if end < head.shape[0] else [])]


def of_joined_qkv(
    fuse: Converter, num_heads: int, num_kv_heads: int, head_dim: int, *, by_head: bool = False
) -> Converter:
    """Return `fuse` for one tensor with the rows of Q, K and V, one after another, or with `by_head` each head's in
    turn."""
    queries, pairs = num_heads * head_dim, num_kv_heads * head_dim

    def convert(joined: np.ndarray) -> np.ndarray | LazyConcat:
        if joined.shape[0] != queries + 2 * pairs:
            raise ValueError(f"{joined.shape[0]} rows are not those of {num_heads} and twice {num_kv_heads} heads")
        if by_head:
            heads = np.asarray(joined).reshape(num_heads, 3, head_dim, *joined.shape[1:])
            return fuse(*(heads[:, part].reshape(queries, *joined.shape[1:]) for part in range(3)))
        return fuse(joined[:queries], joined[queries : queries + pairs], joined[queries + pairs :])

    return convert


def place_kv(layout: HeadLayout, num_kv_heads: int, head_dim: int) -> Converter:
    """Return a converter of a K or V matrix, [num_kv_heads * head_dim, embed] -> [embed, kv_heads * head_dim], where
    each slot has its own head's columns."""

    def convert(stored: np.ndarray) -> LazyConcat:
        heads = stored.reshape(num_kv_heads, head_dim, -1)
        padding = zeros(heads.shape[1:], stored.dtype)
        return LazyConcat([heads[kv] if kv >= 0 else padding for kv in layout.kv_of_slot], 0).T

    return convert


def rotary_last(heads: int, slots: int, plain: int, rotary: int, *, rotates_neighbours: bool) -> Converter:
    """Return a converter [heads * (plain + rotary), in] -> [in, slots * (plain + rotary)], zero for slots beyond the
    heads; each head's last `rotary` rows are reordered as in `fuse_qkv`.

    Biases come and go without the axis `in`.
    """

    def convert(stored: np.ndarray) -> LazyConcat:
        pieces: list[np.ndarray] = []
        for head in stored.reshape(heads, plain + rotary, *stored.shape[1:]):
            turned = head[plain:]
            pieces += [head[:plain], *([turned[::2], turned[1::2]] if rotates_neighbours else [turned])]
        padding = zeros(((slots - heads) * (plain + rotary), *stored.shape[1:]), stored.dtype)
        return LazyConcat([*pieces, padding], 0).T

    return convert


def place_heads(layout: HeadLayout) -> Converter:
    """Return a converter of one number a query head, [num_heads] -> [kv_heads * q_per_kv], zero for padding heads."""
    heads = np.array(layout.q_of_slot).reshape(-1)
    return lambda by_head: np.where(heads < 0, 0, by_head[heads]).astype(by_head.dtype)


def split_out(layout: HeadLayout, num_heads: int, head_dim: int) -> Converter:
    """Return a converter [embed, num_heads * head_dim] -> [kv_heads * q_per_kv * head_dim, embed], zero for padding
    heads."""

    def convert(out: np.ndarray) -> LazyConcat:
        by_head = out.T.reshape(num_heads, head_dim, -1)
        padding = zeros((head_dim, len(out)), out.dtype)
        heads = [head for slot in layout.q_of_slot for head in slot]
        return LazyConcat([by_head[head] if head >= 0 else padding for head in heads], 0)

    return convert

"""From a checkpoint's tensors to parameters, in NumPy.

PyTorch stores a linear layer as [out, in]; here the contracted dimension comes first. Each function below
returns a converter for `WeightSource.convert`. Results are views of what went in, or joined of such views when they are
sliced: the copy of a device's part is the only one made. Padding (slots of a head layout, MLP columns, vocabulary rows)
is zero, so it adds nothing to any dot.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from jpaged.model_api import HeadLayout

from .joined import Joined, lines, zeros

Converter = Callable[..., "np.ndarray | Joined"]


def as_stored(array: np.ndarray) -> np.ndarray:
    """Norm scales, output biases and everything else that needs no change."""
    return array


def _resized(array: np.ndarray | Joined, axis: int, size: int) -> np.ndarray | Joined:
    """Zero-padded at the end of `axis`; the array itself when it has that size already."""
    missing = size - array.shape[axis]
    if missing == 0:
        return array
    if missing < 0:
        raise ValueError(f"axis {axis} of {array.shape} is longer than {size}")
    padding = zeros((*array.shape[:axis], missing, *array.shape[axis + 1 :]), array.dtype)
    return Joined([array, padding], axis)


def pad_axis(axis: int, size: int) -> Converter:
    """Zero-padded to `size` along `axis`."""
    return lambda array: _resized(array, axis, size)


def pad_rows(rows: int) -> Converter:
    """[n, ...] -> [rows, ...]: biases of padded columns."""
    return pad_axis(0, rows)


def vocab_rows(vocab_size: int, rows: int) -> Converter:
    """[vocab_size, ...] -> [rows, ...]: a vocabulary's table, padded so that shards are alike.

    Tables with fewer rows than `vocab_size` are refused: the tokens without a row would look like padding.
    """

    def convert(table: np.ndarray) -> np.ndarray | Joined:
        if table.shape[0] < vocab_size:
            raise ValueError(f"vocab_size={vocab_size} in the config, but only {table.shape[0]} rows are stored")
        return _resized(table, 0, rows)

    return convert


def linear(inputs: int, outputs: int) -> Converter:
    """[out, in] -> [inputs, outputs], either padded."""
    return lambda array: _resized(_resized(array.T, 0, inputs), 1, outputs)


def _in_turn(gate: np.ndarray, up: np.ndarray, axis: int, width: int, shards: int) -> Joined:
    """Both padded to `width` along `axis`; of each shard gate's part, then up's."""
    if gate.shape != up.shape or gate.shape[axis] > width:
        raise ValueError(f"gate {gate.shape} and up {up.shape} do not make {width} columns each")
    borders = range(0, width + 1, width // shards)
    parts = [lines(array, axis, *part) for part in pairwise(borders) for array in (gate, up)]
    return Joined([piece for part in parts for piece in part], axis)


def fuse_gate_up(width: int, shards: int) -> Converter:
    """gate and up, [mlp, embed] each -> [embed, 2 * width], padded; each shard's gate columns, then its up's.

    Biases, [mlp] each, -> [2 * width].
    """
    return lambda gate, up: _in_turn(gate, up, 0, width, shards).T


def split_gate_up(width: int, shards: int) -> Converter:
    """[experts, embed, gate and up columns] -> [experts, embed, 2 * width], the columns as in `fuse_gate_up`."""
    return lambda both: _in_turn(*np.split(both, 2, axis=2), 2, width, shards)


def split_alternating(width: int, shards: int) -> Converter:
    """The same where gate and up columns alternate; biases, [experts, columns], -> [experts, 2 * width]."""
    return lambda both: _in_turn(both[..., ::2], both[..., 1::2], both.ndim - 1, width, shards)


def fuse_qkv(
    layout: HeadLayout, num_heads: int, num_kv_heads: int, head_dim: int, *, rotates_neighbours: bool = False
) -> Converter:
    """q [num_heads * head_dim, embed] and k, v [num_kv_heads * head_dim, embed] in the columns of one matrix.

    The result is [embed, kv_heads * (q_per_kv + 2) * head_dim], slot by slot the queries, the K and the V. Biases
    come and go without the embed dimension. Of layers that read another's KV there is only q, and the result is
    [embed, kv_heads * q_per_kv * head_dim]. With `rotates_neighbours` the rows of each head of q and k are reordered,
    the even ones first, so that the pairs a rotation turns lie half a head apart; their products stay the same.
    """

    def rows(head: np.ndarray, rotates: bool) -> list[np.ndarray]:
        return [head[::2], head[1::2]] if rotates and rotates_neighbours else [head]

    def convert(q: np.ndarray, *kv_pair: np.ndarray) -> Joined:
        embed = q.shape[1:]
        q = q.reshape(num_heads, head_dim, *embed)
        pair = [a.reshape(num_kv_heads, head_dim, *embed) for a in kv_pair]
        padding = zeros((head_dim, *embed), q.dtype)
        pieces: list[np.ndarray] = []
        for kv, heads in zip(layout.kv_of_slot, layout.q_of_slot, strict=True):
            for head in heads:
                pieces += rows(q[head] if head >= 0 else padding, True)
            for number, stored in enumerate(pair):
                pieces += rows(stored[kv] if kv >= 0 else padding, number == 0)
        return Joined(pieces, 0).T

    return convert


def place_heads(layout: HeadLayout) -> Converter:
    """A number a query head, [num_heads] -> [kv_heads * q_per_kv], zero for padding heads."""
    heads = np.array(layout.q_of_slot).reshape(-1)
    return lambda by_head: np.where(heads < 0, 0, by_head[heads]).astype(by_head.dtype)


def split_out(layout: HeadLayout, num_heads: int, head_dim: int) -> Converter:
    """[embed, num_heads * head_dim] -> [kv_heads * q_per_kv * head_dim, embed], zero for padding heads."""

    def convert(out: np.ndarray) -> Joined:
        by_head = out.T.reshape(num_heads, head_dim, -1)
        padding = zeros((head_dim, len(out)), out.dtype)
        heads = [head for slot in layout.q_of_slot for head in slot]
        return Joined([by_head[head] if head >= 0 else padding for head in heads], 0)

    return convert

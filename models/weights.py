"""From a checkpoint's tensors to parameters, in NumPy.

PyTorch stores a linear layer as [out, in]; here the contracted dimension comes first. Each function below
returns a converter for `WeightSource.convert`. Results may be transposed views of what went in: the copy to
the device is the only one made. Padding (slots of a head layout, MLP columns, vocabulary rows) is zero, so it
adds nothing to any dot.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jpaged.model_api import HeadLayout

Converter = Callable[..., np.ndarray]


def as_stored(array: np.ndarray) -> np.ndarray:
    """Norm scales, output biases and everything else that needs no change."""
    return array


def _resized(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Zero-padded at the end of `axis`; the array itself when it has that size already."""
    if array.shape[axis] == size:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return np.pad(array, widths)


def pad_axis(axis: int, size: int) -> Converter:
    """Zero-padded to `size` along `axis`."""
    return lambda array: _resized(array, axis, size)


def pad_rows(rows: int) -> Converter:
    """[n, ...] -> [rows, ...]: embedding tables and biases of padded columns."""
    return pad_axis(0, rows)


def linear(inputs: int, outputs: int) -> Converter:
    """[out, in] -> [inputs, outputs], either padded."""
    return lambda array: _resized(_resized(array.T, 0, inputs), 1, outputs)


def fuse_gate_up(width: int, shards: int) -> Converter:
    """gate and up, [mlp, embed] each -> [embed, 2 * width], padded; each shard's gate columns, then its up's.

    Biases, [mlp] each, -> [2 * width].
    """

    def convert(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        parts = [_resized(a, 0, width).reshape(shards, width // shards, *a.shape[1:]) for a in (gate, up)]
        return np.concatenate(parts, axis=1).reshape(2 * width, *gate.shape[1:]).T

    return convert


def split_gate_up(width: int, shards: int) -> Converter:
    """[experts, embed, gate and up columns] -> [experts, embed, 2 * width], the columns as in `fuse_gate_up`."""

    def convert(both: np.ndarray) -> np.ndarray:
        split = [_resized(a, 2, width) for a in np.split(both, 2, axis=2)]
        parts = [a.reshape(*a.shape[:2], shards, width // shards) for a in split]
        return np.concatenate(parts, axis=3).reshape(*both.shape[:2], 2 * width)

    return convert


def split_alternating(width: int, shards: int) -> Converter:
    """The same where gate and up columns alternate; biases, [experts, columns], -> [experts, 2 * width]."""
    split = split_gate_up(width, shards)

    def convert(both: np.ndarray) -> np.ndarray:
        apart = np.concatenate([both[..., ::2], both[..., 1::2]], axis=-1)
        return split(apart) if both.ndim == 3 else split(apart[:, None])[:, 0]

    return convert


def fuse_qkv(
    layout: HeadLayout, num_heads: int, num_kv_heads: int, head_dim: int, *, rotates_neighbours: bool = False
) -> Converter:
    """q [num_heads * head_dim, embed] and k, v [num_kv_heads * head_dim, embed] in the columns of one matrix.

    The result is [embed, kv_heads * (q_per_kv + 2) * head_dim], slot by slot the queries, the K and the V. Biases
    come and go without the embed dimension. Of layers that read another's KV there is only q, and the result is
    [embed, kv_heads * q_per_kv * head_dim]. With `rotates_neighbours` the rows of each head of q and k are reordered,
    the even ones first, so that the pairs a rotation turns lie half a head apart; their products stay the same.
    """
    evens_first = np.arange(head_dim).reshape(-1, 2).T.reshape(-1)
    order = evens_first if rotates_neighbours else slice(None)

    def convert(q: np.ndarray, *kv_pair: np.ndarray) -> np.ndarray:
        embed = q.shape[1:]
        q = q.reshape(num_heads, head_dim, *embed)[:, order]
        pair = [a.reshape(num_kv_heads, head_dim, *embed) for a in kv_pair]
        if pair:
            pair[0] = pair[0][:, order]
        fused = np.zeros((layout.kv_heads, layout.q_per_kv + len(pair), head_dim, *embed), q.dtype)
        for slot, (kv, heads) in enumerate(zip(layout.kv_of_slot, layout.q_of_slot, strict=True)):
            for place, head in enumerate(heads):
                if head >= 0:
                    fused[slot, place] = q[head]
            if kv >= 0:
                for row, stored in enumerate(pair, start=layout.q_per_kv):
                    fused[slot, row] = stored[kv]
        return fused.reshape(-1, *embed).T

    return convert


def place_heads(layout: HeadLayout) -> Converter:
    """A number a query head, [num_heads] -> [kv_heads * q_per_kv], zero for padding heads."""
    heads = np.array(layout.q_of_slot).reshape(-1)
    return lambda by_head: np.where(heads < 0, 0, by_head[heads]).astype(by_head.dtype)


def split_out(layout: HeadLayout, num_heads: int, head_dim: int) -> Converter:
    """[embed, num_heads * head_dim] -> [kv_heads * q_per_kv * head_dim, embed], zero for padding heads."""

    def convert(out: np.ndarray) -> np.ndarray:
        by_head = out.T.reshape(num_heads, head_dim, -1)
        heads = np.array(layout.q_of_slot).reshape(-1)
        placed = by_head[heads]
        placed[heads < 0] = 0
        return placed.reshape(-1, out.shape[0])

    return convert

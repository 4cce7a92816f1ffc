"""Cuts long contexts into splits (flash-decoding), and merges their results, always in the same order.

A row's splits depend on its own position only, so that it has the same bits in a chunk of its prompt, where one thread
takes split by split, and in decoding, where several threads do.
"""

from __future__ import annotations

from numba import njit

from pallas_kernels.paged_attention.cpu_math import FAST, LN_2, exp

SPLIT = 1024
"""Keys of a split, doubled until a context has at most `MOST_SPLITS` splits."""
MOST_SPLITS = 16


def most_splits(keys: int) -> int:
    """Return the most splits that a context of up to `keys` keys may have."""
    return min(MOST_SPLITS, -(-keys // SPLIT))


@njit
def split_size(stop):
    """Return the keys of a split for a row that sees keys up to `stop`."""
    size = SPLIT
    while size * MOST_SPLITS < stop:
        size *= 2
    return size


@njit
def splits_of(first, stop):
    """Return the splits of a row that sees keys from `first` to `stop`."""
    size = split_size(stop)
    return range(first // size, (stop + size - 1) // size)


@njit(fastmath=FAST)
def merge(top, total, values, its_top, its_total, its_values):
    """Merge the softmax of further keys (maximum in base 2, sum, weighted values) into the state so far.

    Updates `values` in place; returns the new maximum and sum.
    """
    new_top = max(top, its_top)
    keep, take = exp((top - new_top) * LN_2), exp((its_top - new_top) * LN_2)
    for lane in range(values.size):
        values[lane] = values[lane] * keep + its_values[lane] * take
    return new_top, total * keep + its_total * take

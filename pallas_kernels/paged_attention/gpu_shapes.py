"""Chooses the GPU attention kernels' launch shapes: every number that could be tuned, by shape.

They were chosen by reasoning, from the shared memory and registers that the compiler reports, and have not been
tuned on a GPU. All fit the 99 KB of shared memory that every GPU from sm_80 on has.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_WIDTH = 256
"""Widest head, in lanes."""
MAX_UNITS = 2048
"""Decode units of a batch whose sequences all fill their block tables; their partial results are kept in memory."""
MIN_UNIT = 256
"""Keys of the shortest decode unit: at 8 KV heads of 128 a quarter of a MiB of bfloat16, 4 pipelined tiles."""
PROGRAMS = 2048
"""Decode programs: about 4 rounds of the 4 that each of an H100's 132 multiprocessors holds at once."""
JOINED = 16
"""Units that the second pass reads at once."""


class Tiles(NamedTuple):
    """Says how many rows and keys one product has, and how a program runs it."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tiles(group: int, width: int, itemsize: int, *, matrix_units: bool = True) -> Tiles:
    """Return the tiles of a decode, whose rows are the `group` query heads of a KV head; tensor cores need at least 16.

    Two tiles of K and V are in flight: 64 KiB a program, 3 programs a multiprocessor on an H100.
    Without matrix units padding rows cost as much as others, and each thread holds its operands in registers.
    """
    if not matrix_units:
        return Tiles(
            _next_power_of_two(group), min(32, 4096 // width), num_warps=4 if width <= 128 else 8, num_stages=1
        )
    return Tiles(max(16, _next_power_of_two(group)), _keys(width, itemsize), num_warps=4, num_stages=3)


def prefill_tiles(
    group: int, width: int, itemsize: int, longest: int, *, in_bytes: bool = False, matrix_units: bool = True
) -> Tiles:
    """Return the tiles of a prefill, whose rows are (query, query head) pairs: as many as registers hold, fewer when no
    sequence has so many.

    Products of float32 take three passes of the tensor cores and a multiple of the registers. More than 32 keys
    spill registers on sm_80 and sm_100, as do more than half the rows if K and V are unpacked from bytes.
    """
    if not matrix_units:
        return Tiles(max(16, _next_power_of_two(group)), 16, num_warps=4 if width <= 128 else 8, num_stages=1)
    half = itemsize == 2
    most = min(128, 16384 // width) // (1 + in_bytes) if half else min(32, 2048 // width)
    rows = max(16, min(most, _next_power_of_two(group * longest)), _next_power_of_two(group))
    return Tiles(
        rows,
        min(32, _keys(width, itemsize)),
        num_warps=8 if half and rows >= (32 if in_bytes else 64) else 4,
        num_stages=3 if half and width <= 128 else 2,
    )


def decode_unit(seqs: int, capacity: int) -> int:
    """Return how many keys a decode unit has: so many that `seqs` block tables of `capacity` tokens are `MAX_UNITS`
    units or fewer.

    It depends on shapes alone, so that a sequence is cut in the same way in every batch.
    """
    return max(MIN_UNIT, _next_power_of_two(-(-seqs * capacity // MAX_UNITS)))


def seq_lanes(seqs: int) -> int:
    """Return the number of lanes over the sequences: a power of two, alike for all small batches, which then share a
    kernel's code."""
    return max(32, _next_power_of_two(seqs))


def _keys(width: int, itemsize: int) -> int:
    """Return the number of keys whose K takes 16 KiB: 64 at most, 32 of float32, whose products take more registers."""
    return max(16, min(128 // itemsize, 16 * 1024 // (width * itemsize)))


def _next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

"""Holds the loop of `pallas_kernels.rotated_heads.cpu`, compiled by Numba: a few tokens are an item of work."""

from __future__ import annotations

from numba import njit

from pallas_kernels import ffi
from pallas_kernels.ffi import argument, dimension, result
from pallas_kernels.row_ops.cpu_kernel import LOOSE, ROWS, register, row_at


@ffi.known_again
def target() -> str:
    """Return the name of the custom call (joined ``[tokens, heads, rows, head_dim]``, cos, sin ``[tokens, half]``) ->
    (turned queries ``[tokens, heads, rows - 2, head_dim]``, turned keys and values ``[tokens, heads, head_dim]``)."""
    return register("jpaged_rotated_heads", _rotate)


@njit(fastmath=LOOSE)
def _turn(x, cos, sin, out):
    half = cos.size
    for pair in range(half):
        left, right = x[pair], x[half + pair]
        out[pair] = left * cos[pair] - right * sin[pair]
        out[half + pair] = right * cos[pair] + left * sin[pair]
    out[2 * half :] = x[2 * half :]


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _rotate(frame, begin, end):
    joined, angles = argument(frame, 0), argument(frame, 1)
    tokens, heads, rows, width = dimension(joined, 0), dimension(joined, 1), dimension(joined, 2), dimension(joined, 3)
    half = dimension(angles, 1)
    for token in range(begin * ROWS, min(end * ROWS, tokens)):
        cos, sin = row_at(angles, token, half), row_at(argument(frame, 2), token, half)
        for head in range(token * heads, (token + 1) * heads):
            for row in range(rows - 2):
                _turn(
                    row_at(joined, head * rows + row, width),
                    cos,
                    sin,
                    row_at(result(frame, 0), head * (rows - 2) + row, width),
                )
            _turn(row_at(joined, (head + 1) * rows - 2, width), cos, sin, row_at(result(frame, 1), head, width))
            row_at(result(frame, 2), head, width)[:] = row_at(joined, (head + 1) * rows - 1, width)

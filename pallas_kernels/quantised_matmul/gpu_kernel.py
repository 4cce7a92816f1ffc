"""Multiplies rows with codes of 8 or 4 bits, in Triton; codes become floats only in registers.

Memory. x, codes, scales and minimums lie in global memory; the codes, the largest, are read once for a tile of rows. A
step brings a tile of x, [TILE, DEPTH], and one of codes, [LINES, COLUMNS] bytes, to shared memory (Triton's pipeline
keeps `num_stages` of them on their way), decodes the codes in registers and multiplies both in the matrix units. The
sum, [TILE, COLUMNS] in float32, stays in registers until the last step.

    x     [rows, INPUTS]     -> tile [TILE, DEPTH]       program axis 0: rows / TILE
    codes [LINES a step, ..] -> tile [LINES, COLUMNS]    program axis 1: OUTPUTS / COLUMNS
    out   [rows, PARTS, OUTPUTS]                         program axis 2: shares of the inputs

Loops. Over the steps along the inputs; a step is a group of codes that share a scale, where there are groups, so a
scale multiplies a product [TILE, COLUMNS] instead of codes.

`multiply_code_groups` does the same with the codes of experts, without shares of the inputs; its tiles of rows are
those of `pallas_kernels.matmul.gpu_grouped`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.matmul.gpu_grouped import tile_of_program


@triton.jit
def multiply_codes(
    x,
    sums,
    codes,
    scales,
    minimums,
    row_count,
    out,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    SCALES_DOWN: tl.constexpr,
    SCALES_ACROSS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPED: tl.constexpr,
    PACKED: tl.constexpr,
    E2M1: tl.constexpr,
    FLOAT8: tl.constexpr,
    MINIMUMS: tl.constexpr,
):
    """Write the products of x [rows, INPUTS] with a matrix of codes to out [rows, PARTS, OUTPUTS], to be summed up.

    Program (r, c, p) has TILE rows, COLUMNS outputs and one of PARTS equal shares of the inputs; see
    `product_of_steps`, whose arguments have these names.

    Args:
        codes: bytes; neighbouring inputs are DOWN bytes apart, neighbouring outputs ACROSS bytes.
        scales, minimums: one for each group and output; SCALES_DOWN and SCALES_ACROSS are their strides.
        row_count: number of rows; not a constant, so that batches of all sizes share the kernel's code.
    """
    LINES: tl.constexpr = DEPTH // 2 if PACKED else DEPTH
    STEPS: tl.constexpr = INPUTS // DEPTH
    # A matrix with few outputs has too few tiles for all multiprocessors: PARTS programs share a tile's inputs, and
    # XLA adds their sums up in a fixed order. Atomic additions would make the order, and so the bits, random.
    SHARE: tl.constexpr = STEPS // PARTS
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    is_row, is_column = row < row_count, column < OUTPUTS
    line = tl.arange(0, LINES)
    total = product_of_steps(
        x + row[:, None] * INPUTS + line[None, :],
        sums + row * STEPS,
        codes + line[:, None] * DOWN + column[None, :] * ACROSS,
        scales + column * SCALES_ACROSS,
        minimums + column * SCALES_ACROSS,
        is_row,
        is_column,
        part * SHARE,
        (part + 1) * SHARE,
        DEPTH,
        DOWN,
        SCALES_DOWN,
        TILE,
        COLUMNS,
        TURN,
        GROUPED,
        PACKED,
        E2M1,
        FLOAT8,
        MINIMUMS,
    )
    at = out + (row * PARTS + part)[:, None] * OUTPUTS + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def product_of_steps(
    rows,
    sums,
    codes,
    scales,
    minimums,
    is_row,
    is_column,
    first,
    last,
    DEPTH: tl.constexpr,
    DOWN: tl.constexpr,
    SCALES_DOWN: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
    GROUPED: tl.constexpr,
    PACKED: tl.constexpr,
    E2M1: tl.constexpr,
    FLOAT8: tl.constexpr,
    MINIMUMS: tl.constexpr,
):
    """Return the products, [TILE, COLUMNS] float32, of some rows with codes in the steps ``first <= step < last``, each
    of DEPTH inputs, TURN of them a turn.

    GROUPED: a step is a group, whose product with the codes is scaled; else an output has one scale. MINIMUMS: groups
    have minimums. FLOAT8: codes are float8_e4m3fn. PACKED: a byte has two codes of four bits, a group's first half in
    the low nibbles; they are numbers from 0 to 15 with minimums or, E2M1, floats whose scales are exponents. With
    numbers ``sum(x * (code * scale + minimum))`` is computed as
    ``sum(x * (code - 8)) * scale + sum(x) * (minimum + 8 * scale)``, whose last factor is small.

    Args:
        rows: pointers to the rows' inputs of step 0, [TILE, lines].
        sums: pointers to the rows' sums over group 0, float32; the sums over later groups follow.
        codes: pointers to the bytes of step 0, [lines, COLUMNS].
        scales, minimums: pointers to those of group 0, [COLUMNS].
    """
    LINES: tl.constexpr = DEPTH // 2 if PACKED else DEPTH
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    # The pipeline fetches whole turns ahead. Short steps are unrolled, TURN to a turn, so that a turn's copies are
    # large enough to hide the memory's latency; longer turns would spill registers.
    for turn in range(first, last, TURN):
        for nth in tl.static_range(TURN):
            step = turn + nth
            held = tl.load(codes + step * (LINES * DOWN), mask=is_column[None, :], other=0)
            left = tl.load(rows + step * DEPTH, mask=is_row[:, None], other=0.0)
            if PACKED:
                # A group's first half lies in the low nibbles and its second half in the high ones. So each half of the
                # codes meets a run of neighbours of x, and nothing is interleaved.
                right = tl.load(rows + (step * DEPTH + LINES), mask=is_row[:, None], other=0.0)
                product = tl.dot(left, numbers(held & 15, left.dtype, E2M1))
                product = tl.dot(right, numbers(held >> 4, left.dtype, E2M1), product)
            elif FLOAT8:
                product = tl.dot(left, held.to(tl.float8e4nv, bitcast=True).to(left.dtype))
            else:
                product = tl.dot(left, held.to(tl.float32).to(left.dtype))
            if GROUPED:
                scale = factors(tl.load(scales + step * SCALES_DOWN, mask=is_column, other=0), E2M1)
                total += product * scale[None, :]
                if MINIMUMS:
                    # sum(x * minimum) of a group is the minimum times the sum of x, which XLA has computed before.
                    least = tl.load(minimums + step * SCALES_DOWN, mask=is_column, other=0.0).to(tl.float32)
                    if PACKED:
                        least += 8 * scale
                    total += tl.load(sums + step, mask=is_row, other=0.0)[:, None] * least[None, :]
            else:
                total += product
    if not GROUPED:
        # One scale an output: it multiplies the sum once.
        total = total * factors(tl.load(scales, mask=is_column, other=0), E2M1)[None, :]
    return total


@triton.jit
def numbers(codes, dtype: tl.constexpr, E2M1: tl.constexpr):
    """Decode 4-bit codes to `dtype`: ``code - 8``, or a float of two bits of exponent and one of mantissa.

    A code becomes the last mantissa bits of 1024 or 2**23, which is then subtracted together with the 8; the bits of an
    E2M1 code go to their places in a float16.
    """
    if E2M1:
        wide = codes.to(tl.uint16)
        halves = ((wide & 7) << 9 | (wide & 8) << 12).to(tl.float16, bitcast=True)
        values = (halves.to(tl.float32) * 16384.0).to(dtype)  # the exponents' biases are 14 apart
    elif dtype == tl.float16:
        values = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0  # 0x6400: 1024
    else:
        values = ((codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0).to(dtype)  # 2**23
    return values


@triton.jit
def factors(scales, E2M1: tl.constexpr):
    """Return scales as float32; E2M1: they are exponents of two, plus 127, and 255 means no number."""
    if E2M1:
        wide = scales.to(tl.int32)
        bits = tl.where(wide == 0, 0x00400000, wide << 23)
        values = tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        values = scales.to(tl.float32)
    return values


@triton.jit
def multiply_code_groups(
    x,
    sums,
    codes,
    scales,
    minimums,
    row_count,
    counts,
    out,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
    GROUPED: tl.constexpr,
    PACKED: tl.constexpr,
    E2M1: tl.constexpr,
    FLOAT8: tl.constexpr,
    MINIMUMS: tl.constexpr,
):
    """Write the products of x [rows, INPUTS], sorted by expert, with [EXPERTS, INPUTS, OUTPUTS] codes to out.

    Program (p, c) has the p-th tile of rows, see `pallas_kernels.matmul.gpu_grouped.tile_of_program`, and columns from
    ``c * COLUMNS`` on. The other arguments are those of `pallas_kernels.quantised_matmul.gpu_kernel.product_of_steps`.
    """
    LINES: tl.constexpr = DEPTH // 2 if PACKED else DEPTH
    STEPS: tl.constexpr = INPUTS // DEPTH
    SCALES: tl.constexpr = STEPS * OUTPUTS if GROUPED else OUTPUTS
    expert, first_row, end = tile_of_program(counts, row_count, EXPERTS, GROUPS, TILE)
    row = first_row + tl.arange(0, TILE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.arange(0, LINES)
    is_row, is_column = row < end, column < OUTPUTS
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    if expert < EXPERTS:
        own = expert.to(tl.int64)
        total = product_of_steps(
            x + row[:, None] * INPUTS + line[None, :],
            sums + row * STEPS,
            codes + own * (STEPS * LINES * OUTPUTS) + line[:, None] * OUTPUTS + column[None, :],
            scales + own * SCALES + column,
            minimums + own * SCALES + column,
            is_row,
            is_column,
            0,
            STEPS,
            DEPTH,
            OUTPUTS,
            OUTPUTS,
            TILE,
            COLUMNS,
            TURN,
            GROUPED,
            PACKED,
            E2M1,
            FLOAT8,
            MINIMUMS,
        )
    at = out + row[:, None] * OUTPUTS + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])

"""Multiplies float32 rows with tiled matrices, to the values that their codes stand for, in loops that Numba compiles.

Rows are not rounded. What they are multiplied with are the numbers that `QuantisedMatrix.dequantised` gives, to the
last bit, and a row's sums have one order, whatever the other rows are.

Memory. Some panels are an item of work. Their codes are decoded, up to `DEPTH` inputs at a time, to float32 numbers
[inputs, panels * 16] on the stack, which stay in the first cache while all rows are multiplied with them. A single row
is multiplied with each number where it is decoded, and gets the same bits.

    tile (16 outputs x 4 bytes) -> for each byte, or half of one, a vector of 16 numbers, times scale, plus minimum

Loops, from outside: panels; `DEPTH` inputs; in these, runs of inputs that share a scale and a half of their bytes,
which are decoded one after another, and then rows, in tiles of `pallas_kernels.cpu_tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels import ffi
from pallas_kernels.cpu_dots import FLOATS, INTS, Emitter, vector
from pallas_kernels.cpu_features import FEATURES, LANES, has
from pallas_kernels.cpu_panels import GRAINS_OF_EXPERTS, clear_columns, copy_numbers, over_experts
from pallas_kernels.cpu_tiles import VECTORS, remaining_rows, stack_memory
from pallas_kernels.ffi import address, argument, arguments, data, dimension, result
from pallas_kernels.ffi.loops import njit, with_names
from pallas_kernels.ffi.primitives import pointer
from pallas_kernels.quantised import FLOAT8, INT8, UINT4_PAIRS
from pallas_kernels.tiled import INPUTS, OUTPUTS
from pallas_kernels.tiled_matmul.cpu_tiles import FLOAT, TILE_BYTES, repeated
from pallas_kernels.tiled_matmul.variant import ExactVariant

_BYTE, _INT, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
PANELS = 3
"""Panels that are decoded and multiplied together."""
DEPTH = 128
"""Most inputs that are decoded at a time: 24 KiB of three panels."""
GRAINS = 4
"""Portions of a thread."""


def decoding(variant: ExactVariant, panels: int, half: int) -> Any:
    """Return ``f(w, w_panel, quads, scales, minimums, scales_panel, aside, 0)``, to be called from compiled loops.

    It writes the numbers of so many tiles of some panels, whose inputs share a scale, to `aside`: rows of all panels'
    outputs, an input each. ``_panel`` is the bytes from one panel to the next. Of bytes with two codes it takes the low
    ones, or with `half` the high ones.
    """

    @intrinsic
    def decode(typingctx, w, w_panel, quads, scales, minimums, scales_panel, aside, unused):
        def generate(context, builder, signature, args):
            *matrix, aside, _ = args
            emit = Emitter(builder)

            def put(quad: ir.Value, number: int, values: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
                to = emit.at(aside, emit.times(quad, INPUTS * panels * TILE_BYTES), number * panels * TILE_BYTES)
                for panel, value in enumerate(values):
                    emit.store(value, emit.at(to, panel * TILE_BYTES))
                return sums

            _emit_decoding(emit, variant, panels, half, matrix, [], put)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return decode


def row_product(variant: ExactVariant, panels: int, half: int) -> Any:
    """Return ``f(w, w_panel, quads, scales, minimums, scales_panel, x, sums)``, to be called from compiled loops.

    It adds the products of one row's numbers, at x, with what `decoding` would write to the sums of all panels'
    outputs, in the order of the inputs.
    """

    @intrinsic
    def multiply(typingctx, w, w_panel, quads, scales, minimums, scales_panel, x, sums):
        def generate(context, builder, signature, args):
            *matrix, x, sums = args
            emit = Emitter(builder)

            def add(quad: ir.Value, number: int, values: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
                at = emit.at(x, emit.times(quad, INPUTS * FLOAT), number * FLOAT)
                mine = emit.spread(emit.load(at, ir.FloatType()), OUTPUTS)
                return [
                    emit.call("llvm.fma.v16f32", FLOATS, [mine, value, total])
                    for value, total in zip(values, sums, strict=True)
                ]

            places = [emit.at(sums, panel * TILE_BYTES) for panel in range(panels)]
            start = [emit.load(place, FLOATS) for place in places]
            for total, place in zip(
                _emit_decoding(emit, variant, panels, half, matrix, start, add), places, strict=True
            ):
                emit.store(total, place)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return multiply


def _emit_decoding(
    emit: Emitter,
    variant: ExactVariant,
    panels: int,
    half: int,
    matrix: Sequence[ir.Value],
    start: list[ir.Value],
    use: Callable[[ir.Value, int, list[ir.Value], list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:
    """Append a loop over tiles, and return its sums, which begin with `start`.

    Args:
        matrix: the first arguments of `decoding`'s function.
        use: called with the number of a tile, an input's place in it, that input's numbers in each panel and the sums;
            returns the sums.
    """
    w, w_panel, quads, scales, minimums, scales_panel = matrix
    builder = emit.builder

    def of_panels(first: ir.Value) -> list[ir.Value]:
        return [_floats(emit, emit.at(first, emit.times(scales_panel, panel)), variant) for panel in range(panels)]

    factors, least = of_panels(scales), of_panels(minimums) if variant.minimums else []
    places = [emit.at(w, emit.times(w_panel, panel)) for panel in range(panels)]

    def one_quad(quad: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        tiles = [emit.load(emit.at(place, emit.times(quad, TILE_BYTES)), INTS) for place in places]
        numbers_of = [_numbers(emit, codes, variant, half) for codes in tiles]
        for number in range(INPUTS):
            values = [
                builder.fmul(numbers(number), factor) for numbers, factor in zip(numbers_of, factors, strict=True)
            ]
            if least:
                values = [builder.fadd(value, low) for value, low in zip(values, least, strict=True)]
            sums = use(quad, number, values, sums)
        return sums

    return repeated(emit, quads, start, one_quad)


def _numbers(emit: Emitter, codes: ir.Value, variant: ExactVariant, half: int) -> Callable[[int], ir.Value]:
    """Return a function of an input's place in a tile, which gives the numbers that the 16 outputs' codes stand for.

    Args:
        codes: the tile, as a number of 32 bits an output.
        half: see `decoding`.
    """
    if variant.table is not None:
        return partial(_of_four_bits, emit, codes, variant, half)
    if variant.codec == INT8.name:
        return partial(_of_int8, emit, codes)
    assert variant.codec == FLOAT8.name, variant.codec
    return _of_float8_by_tables(emit, codes) if has("avx512vbmi") else partial(_of_float8, emit, codes)


def _of_four_bits(emit: Emitter, codes: ir.Value, variant: ExactVariant, half: int, number: int) -> ir.Value:
    assert variant.table is not None
    builder = emit.builder
    code = builder.lshr(codes, emit.constant(INTS, 8 * number + 4 * half))
    if FEATURES.get("avx512f"):  # a look at a table of a register, which sees no other bits
        numbers = ir.Constant(FLOATS, [ir.Constant(ir.FloatType(), one) for one in variant.table])
        return emit.call("llvm.x86.avx512.permvar.sf.512", FLOATS, [numbers, code])
    code = builder.and_(code, emit.constant(INTS, 15))
    if variant.codec == UINT4_PAIRS.name:
        return builder.sitofp(code, FLOATS)
    return _looked_up(emit, variant.table, code)


def _of_int8(emit: Emitter, codes: ir.Value, number: int) -> ir.Value:
    builder = emit.builder
    top = builder.shl(codes, emit.constant(INTS, 24 - 8 * number))
    signed = builder.xor(top, emit.constant(INTS, 1 << 31))  # codes are held 128 too large
    return builder.sitofp(builder.ashr(signed, emit.constant(INTS, 24)), FLOATS)


def _of_float8_by_tables(emit: Emitter, codes: ir.Value) -> Callable[[int], ir.Value]:
    """Look for both bytes of each number in bfloat16, which has room for it, in tables of 128 bytes."""
    builder, each = emit.builder, vector(_BYTE, 4 * OUTPUTS)
    sizes = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16).view(np.uint16)
    whole = builder.bitcast(codes, each)

    def byte_of(table: np.ndarray) -> ir.Value:
        first, second = (ir.Constant(each, part.tolist()) for part in np.split(table, 2))
        return emit.call("llvm.x86.avx512.vpermi2var.qi.512", each, [first, whole, second])  # does not see the sign

    low, size = byte_of(sizes & 255), byte_of(sizes >> 8)
    high = builder.or_(size, builder.and_(whole, emit.constant(each, 128)))

    def numbers(number: int) -> ir.Value:
        places = [place for code in range(number, 64, 4) for place in (code, code, code, 64 + code)]
        top = builder.bitcast(emit.pick(low, places, high), INTS)
        return builder.bitcast(builder.and_(top, emit.constant(INTS, 0xFFFF0000)), FLOATS)

    return numbers


def _of_float8(emit: Emitter, codes: ir.Value, number: int) -> ir.Value:
    builder = emit.builder

    def constant(value: int) -> ir.Constant:
        return emit.constant(INTS, value)

    top = builder.shl(codes, constant(24 - 8 * number))
    # A float8_e4m3fn has exponent and mantissa where a float32 has them, and counts exponents from 120 less; those
    # without an exponent are whole numbers, as threads may take a float32 without one as 0.
    sign, size = builder.and_(top, constant(1 << 31)), builder.and_(builder.lshr(top, constant(4)), constant(0x7F00000))
    whole = builder.sitofp(builder.lshr(size, constant(20)), FLOATS)
    small = builder.bitcast(builder.fmul(whole, emit.constant(FLOATS, 2.0**-9)), INTS)
    is_small = builder.icmp_unsigned("<", size, constant(1 << 23))
    bits = builder.select(is_small, small, builder.add(size, constant(120 << 23)))
    bits = builder.select(builder.icmp_unsigned("==", size, constant(0x7F00000)), constant(0x7FC00000), bits)
    return builder.bitcast(builder.or_(sign, bits), FLOATS)


def _looked_up(emit: Emitter, table: tuple[float, ...], code: ir.Value) -> ir.Value:
    """Return the numbers of a table in memory whose places `code` names."""
    builder = emit.builder
    numbers = ir.Constant(FLOATS, [ir.Constant(ir.FloatType(), one) for one in table])
    start = emit.spread(builder.ptrtoint(cgutils.global_constant(builder, "table", numbers), _WORD), OUTPUTS)
    wide = builder.zext(code, vector(_WORD, OUTPUTS))
    pointers = builder.inttoptr(
        builder.add(start, builder.mul(wide, emit.constant(wide.type, FLOAT))),
        vector(ir.FloatType().as_pointer(), OUTPUTS),
    )
    every = ir.Constant(vector(ir.IntType(1), OUTPUTS), [1] * OUTPUTS)
    arguments = [pointers, ir.Constant(_INT, FLOAT), every, emit.constant(FLOATS, 0.0)]
    return emit.call("llvm.masked.gather.v16f32.v16p0", FLOATS, arguments)


def _floats(emit: Emitter, at: ir.Value, variant: ExactVariant) -> ir.Value:
    """Return 16 scales or minimums."""
    builder = emit.builder
    if variant.scale == "float32":
        return emit.load(at, FLOATS)
    if variant.scale == "float16":
        return builder.fpext(emit.load(at, vector(ir.HalfType(), OUTPUTS)), FLOATS)
    # Exponents of two, plus 127; the least is no normal number, and 255 is none at all.
    exponents = builder.zext(emit.load(at, vector(_BYTE, OUTPUTS)), INTS)
    least = builder.icmp_unsigned("==", exponents, emit.constant(INTS, 0))
    bits = builder.select(least, emit.constant(INTS, 1 << 22), builder.shl(exponents, emit.constant(INTS, 23)))
    none = builder.icmp_unsigned("==", exponents, emit.constant(INTS, 255))
    bits = builder.select(none, emit.constant(INTS, 0x7FC00000), bits)
    return builder.bitcast(bits, FLOATS)


def _over_runs(variant: ExactVariant, loop: Callable[[ExactVariant, int, int], Any], panels: int, step: int) -> Any:
    """Return ``f(w, w_panel, scales, minimums, scales_panel, group, at, depth, to, sums)`` as a compiled function: it
    calls what `loop` makes for each run of the `depth` inputs from `at` on.

    Args:
        loop: `decoding` or `row_product`.
        step: bytes of an input at `to`.
    """
    low, high = loop(variant, panels, 0), loop(variant, panels, 1)
    packed, of_scale = variant.packed, OUTPUTS * variant.scale_bytes

    def over_runs(w, w_panel, scales, least, s_panel, group, at, depth, to, sums):
        run, done = group // 2 if packed else group, 0
        while done < depth:
            number = (at + done) // group
            within = at + done - number * group
            half = within // run
            start = within - half * run
            some = min(run - start, depth - done)
            theirs, quads = w + (number * run + start) // INPUTS * TILE_BYTES, (some + INPUTS - 1) // INPUTS
            s, less = scales + number * of_scale, least + number * of_scale
            if half == 0:
                low(theirs, w_panel, quads, s, less, s_panel, to + done * step, sums)
            else:
                high(theirs, w_panel, quads, s, less, s_panel, to + done * step, sums)
            done += some

    return njit(over_runs)


def _by_panels(variant: ExactVariant, panels: int) -> Any:
    """Return the product of any number of rows and so many panels, as a compiled function."""
    row_bytes, columns = panels * TILE_BYTES, panels * OUTPUTS
    decode = _over_runs(variant, decoding, panels, row_bytes)
    multiply_row = _over_runs(variant, row_product, panels, FLOAT)
    vectors = columns // LANES
    width = VECTORS if vectors % VECTORS == 0 else 1
    of_decoded = remaining_rows(width)
    groups, group_bytes = vectors // width, width * LANES * FLOAT

    def multiply(x, x_stride, rows, w, w_panel, scales, least, s_panel, inputs, group, out, stride, aside):
        sums, total = carray(pointer(aside), (columns,), np.float32), carray(pointer(out), (columns,), np.float32)
        for at in range(0, inputs, DEPTH):
            depth, mine = min(DEPTH, inputs - at), x + at * FLOAT
            if rows == 1 and depth % INPUTS == 0:
                for column in range(columns):
                    sums[column] = np.float32(0.0)
                multiply_row(w, w_panel, scales, least, s_panel, group, at, depth, mine, aside)
                for column in range(columns):
                    total[column] = sums[column] if at == 0 else total[column] + sums[column]
                continue
            decode(w, w_panel, scales, least, s_panel, group, at, depth, aside, 0)
            for part in range(groups):
                theirs, to = aside + part * group_bytes, out + part * group_bytes
                of_decoded(mine, x_stride, 0, rows, theirs, row_bytes, depth, to, stride, at)

    return njit(multiply)


@cache
def _rows_by_some_panels(variant: ExactVariant) -> Any:
    """Return the product of any number of rows and the panels from one to another, as a compiled function."""
    several, single = _by_panels(variant, PANELS), _by_panels(variant, 1)

    def multiply(x, x_stride, rows, matrix, panel, stop, to, outputs, aside, scratch):
        """Multiply with the panels from `panel` to `stop`.

        Args:
            matrix: addresses of its first panel's codes, scales and minimums; the bytes of a panel's codes and of its
                scales; the inputs, and how many of them share a scale.
            to: address of the result [rows, outputs].
            aside, scratch: addresses of memory for decoded numbers, and of `TILE_BYTES`.
        """
        codes, scales, least, w_panel, s_panel, inputs, group = matrix
        stride = outputs * FLOAT
        while panel < stop:
            w, s, less = codes + panel * w_panel, scales + panel * s_panel, least + panel * s_panel
            out, width = to + panel * TILE_BYTES, outputs - panel * OUTPUTS
            left = min(stop - panel, width // OUTPUTS)
            if left >= PANELS:
                several(x, x_stride, rows, w, w_panel, s, less, s_panel, inputs, group, out, stride, aside)
                panel += PANELS
            elif left > 0:
                single(x, x_stride, rows, w, w_panel, s, less, s_panel, inputs, group, out, stride, aside)
                panel += 1
            else:
                for row in range(rows):
                    mine = x + row * x_stride
                    single(mine, x_stride, 1, w, w_panel, s, less, s_panel, inputs, group, scratch, 0, aside)
                    copy_numbers(scratch, out + row * stride, width)
                panel += 1

    return njit(multiply)


_ASIDE = (DEPTH + INPUTS) * PANELS * TILE_BYTES
"""Bytes of decoded numbers; a tile may have inputs beyond the matrix."""


@cache
def _rows_by_experts(variant: ExactVariant) -> Any:
    """Return the product of experts' rows and their panels, as a compiled function, see `over_experts`."""
    some_panels = _rows_by_some_panels(variant)

    @njit
    def multiply(operands, expert, row, number, panel, stop, to, outputs):
        x, (codes, scales, least, w_panel, s_panel, inputs, group), panels = operands
        before, x_stride = expert * panels, inputs * FLOAT
        w, s, less = codes + before * w_panel, scales + before * s_panel, least + before * s_panel
        matrix = (w, s, less, w_panel, s_panel, inputs, group)
        aside, scratch, mine = stack_memory(_ASIDE), stack_memory(TILE_BYTES), x + row * x_stride
        some_panels(mine, x_stride, number, matrix, panel, stop, to, outputs, aside, scratch)

    return over_experts(multiply)


_some_panels: Any = None
_over_experts: Any = None
_has_minimums: Any = None
_scale_bytes: Any = None
"""Stand for what `_loop` puts in their places."""


@ffi.known_again
def target(variant: ExactVariant) -> str:
    """Return the name of the custom call ``(x, [index, wanted], codes..., scales..., minimums...) -> x @ matrix`` for
    matrices of one variant and shape, of which number `index` is meant.

    x: float32 [rows, inputs]; the result: float32 [rows, outputs]. Only the first `wanted` rows are multiplied; the
    others give 0.
    """
    name = f"jpaged_tiled_exact_{variant.name}"
    ffi.register(name, _loop(_multiply, variant), items_of=((2, 0),), portion=PANELS, grains=GRAINS)
    return name


@ffi.known_again
def grouped_target(variant: ExactVariant) -> str:
    """Return the name of the custom call ``(x, codes, scales, [minimums], counts) -> each row times its expert's
    matrix``, rows of no expert 0.

    Codes, scales and minimums have an axis of experts before the others; counts: int32 [experts]. Matrices without rows
    are not read.
    """
    name = f"jpaged_tiled_exact_experts_{variant.name}"
    ffi.register(name, _loop(_multiply_grouped, variant), items_of=((1, 0), (1, 1)), grains=GRAINS_OF_EXPERTS)
    return name


def _loop(function: Any, variant: ExactVariant) -> Any:
    """Return a function, compiled for a variant."""
    names = {
        "_some_panels": _rows_by_some_panels(variant),
        "_over_experts": _rows_by_experts(variant),
        "_has_minimums": variant.minimums,
        "_scale_bytes": variant.scale_bytes,
    }
    return ffi.cfunc(ffi.RUN, error_model="numpy")(with_names(function, names))


def _multiply(frame, begin, end):
    """Multiply with the panels of items `begin` to `end`."""
    index, wanted = carray(data(argument(frame, 1)), (2,), np.int32)
    matrices = (arguments(frame) - 2) // (3 if _has_minimums else 2)
    first, codes, scales, to = (
        argument(frame, 0),
        argument(frame, 2 + index),
        argument(frame, 2 + matrices + index),
        result(frame, 0),
    )
    least = address(argument(frame, 2 + 2 * matrices + index)) if _has_minimums else 0
    rows, outputs, inputs, panels = dimension(to, 0), dimension(to, 1), dimension(first, 1), dimension(codes, 0)
    live, panel, stop = min(rows, wanted), begin * PANELS, min(end * PANELS, panels)
    if live < rows:
        clear_columns(address(to), live, rows, panel * OUTPUTS, min(stop * OUTPUTS, outputs), outputs)
    groups = dimension(scales, 1)
    w_panel, s_panel = dimension(codes, 1) * TILE_BYTES, groups * OUTPUTS * _scale_bytes
    matrix = (address(codes), address(scales), least, w_panel, s_panel, inputs, inputs // groups)
    aside, scratch, x = stack_memory(_ASIDE), stack_memory(TILE_BYTES), address(first)
    _some_panels(x, inputs * FLOAT, live, matrix, panel, stop, address(to), outputs, aside, scratch)


def _multiply_grouped(frame, begin, end):
    """Multiply experts' rows with the panels of items `begin` to `end`."""
    first, codes, scales, to = argument(frame, 0), argument(frame, 1), argument(frame, 2), result(frame, 0)
    least = address(argument(frame, 3)) if _has_minimums else 0
    experts, panels, groups = dimension(codes, 0), dimension(codes, 1), dimension(scales, 2)
    inputs = dimension(first, 1)
    counts = carray(data(argument(frame, 4 if _has_minimums else 3)), (experts,), np.int32)
    w_panel, s_panel = dimension(codes, 2) * TILE_BYTES, groups * OUTPUTS * _scale_bytes
    table = (address(codes), address(scales), least, w_panel, s_panel, inputs, inputs // groups)
    operands = (address(first), table, panels)
    _over_experts(begin, end, counts, panels, dimension(to, 0), address(to), dimension(to, 1), operands)

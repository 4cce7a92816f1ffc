"""Loads a span's keys and values from their blocks into scratch memory as float32, from any dtype of the view.

Keys are transposed, so that a vector holds one lane of neighbouring keys: scores are then sums of products of whole
vectors, and no sum runs across a vector. All queries of a block share the transposed keys, so the cost of this step
does not grow with their number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.cpu_math import float_of_bits
from pallas_kernels.cpu_tiles import FLOAT, LANES, LINE_BYTES, VECTOR, VectorCode
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import emit_prefetch
from pallas_kernels.paged_attention.cpu_scratch import HALF, SPAN, WORD

_WORD = ir.IntType(64)
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)
_FOUR = 4


def _wide_ints(code: VectorCode, narrow: ir.Value, signed: bool = False) -> ir.Value:
    return code.builder.sext(narrow, _INTS) if signed else code.builder.zext(narrow, _INTS)


def _constant(number: int) -> ir.Constant:
    return ir.Constant(_INTS, [number] * LANES)


def bfloat16(code: VectorCode, bits: ir.Value) -> ir.Value:
    return code.builder.bitcast(code.builder.shl(_wide_ints(code, bits), _constant(16)), VECTOR)


def _bfloat16_of_words(code: VectorCode, words: ir.Value) -> list[ir.Value]:
    """Return the first and the second numbers of pairs of bfloat16."""
    builder = code.builder
    first, second = builder.shl(words, _constant(16)), builder.and_(words, _constant(0xFFFF0000))
    return [builder.bitcast(first, VECTOR), builder.bitcast(second, VECTOR)]


def int8(code: VectorCode, codes: ir.Value) -> ir.Value:
    return code.builder.sitofp(_wide_ints(code, codes, signed=True), VECTOR)


def _int8_of_words(code: VectorCode, words: ir.Value) -> list[ir.Value]:
    builder = code.builder
    tops = [builder.shl(words, _constant(8 * behind)) for behind in (3, 2, 1, 0)]
    return [builder.sitofp(builder.ashr(top, _constant(24)), VECTOR) for top in tops]


def float8(code: VectorCode, narrow: ir.Value) -> ir.Value:
    return _float8_of_bits(code, _wide_ints(code, narrow))


def _float8_of_words(code: VectorCode, words: ir.Value) -> list[ir.Value]:
    builder = code.builder
    bits = (builder.and_(builder.lshr(words, _constant(8 * place)), _constant(0xFF)) for place in range(4))
    return [_float8_of_bits(code, each) for each in bits]


def _float8_of_bits(code: VectorCode, bits: ir.Value) -> ir.Value:
    """Widen float8_e4m3fn by its bits; a subnormal is its mantissa times the least subnormal, 2**-9."""
    builder = code.builder
    sign = builder.shl(builder.and_(bits, _constant(0x80)), _constant(24))
    size = builder.and_(bits, _constant(0x7F))
    normal = builder.add(builder.shl(size, _constant(20)), _constant(120 << 23))
    least = ir.Constant(VECTOR, [2.0**-9] * LANES)
    small = builder.bitcast(builder.fmul(builder.sitofp(size, VECTOR), least), _INTS)
    wide = builder.select(builder.icmp_signed("<", size, _constant(8)), small, normal)
    wide = builder.select(builder.icmp_signed("==", size, _constant(0x7F)), _constant(0x7FC00000), wide)
    return builder.bitcast(builder.or_(wide, sign), VECTOR)


class Numbers(NamedTuple):
    """Base of the types of numbers in a view. Numba compiles the loops anew for each subclass.

    Attributes:
        bytes: of a number.
    """

    bytes: int


class Float32(Numbers):
    """Float32, the dtype of all arithmetic."""


class BFloat16(Numbers):
    """Upper halves of float32."""


class Int8(Numbers):
    """Codes, whose rows have scales; see `pallas_kernels.kv_codes`."""


class Float8(Numbers):
    """The bits of float8_e4m3fn."""


FLOAT32, BFLOAT16, INT8, FLOAT8 = Float32(4), BFloat16(2), Int8(1), Float8(1)

_FORMS = {
    Float32: (4, ir.FloatType(), lambda code, numbers: numbers),
    BFloat16: (2, ir.IntType(16), bfloat16),
    Int8: (1, ir.IntType(8), int8),
    Float8: (1, ir.IntType(8), float8),
}
"""For each form: bytes and LLVM type of a number, and the function that widens a vector of them to float32."""
_OF_WORDS = {BFloat16: _bfloat16_of_words, Int8: _int8_of_words, Float8: _float8_of_words}
"""For each narrow form: the function that widens words of four bytes to one float32 vector of the first number of each
word, one of the second, and so on."""


def _emit_fetch(code: VectorCode, numbers: types.Type, row: ir.Value, offset: ir.Value) -> None:
    """Prefetch `HALF` lanes, from `offset` bytes after the address that is stored at `row`."""
    address = code.at(code.load(row, _WORD), offset)
    for line in range(0, HALF * _FORMS[numbers.instance_class][0], LINE_BYTES):
        emit_prefetch(code.builder, code.at(address, line))


@intrinsic
def _fetch(typingctx, numbers, rows, offset):
    """Prefetch `HALF` lanes of `LANES` rows, from `offset` bytes after each of the addresses in the list `rows`."""

    def generate(context, builder, signature, args):
        _, rows, offset = args
        code = VectorCode(builder)
        for key in range(LANES):
            _emit_fetch(code, numbers, code.at(rows, key * WORD), offset)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp), generate


@intrinsic
def _turn(typingctx, numbers, rows, offset, scales, out, out_stride, coming, further):
    """Transpose `HALF` lanes of `LANES` rows to `out`, as float32: each lane becomes a row of `LANES` keys there.

    The rows begin `offset` bytes after each of the addresses in the list `rows`. Int8 codes are multiplied by the keys'
    scales at `scales`. The unit of the transposition is a word of four bytes, whatever numbers are in it: a vector is
    joined from four words of each of LANES / 4 rows, so that a transposition of 4 x 4 words within its quarters gives
    four columns. The same lanes of the rows at `coming`, `further` bytes on, are prefetched a few at a time: a core
    stalls if more cache lines are on their way than it can track.
    """
    bytes_held, held, _ = _FORMS[numbers.instance_class]
    apart, number = _OF_WORDS.get(numbers.instance_class), held if bytes_held == FLOAT else _INT
    together = FLOAT // bytes_held

    def generate(context, builder, signature, args):
        _, rows, offset, scales, out, out_stride, coming, further = args
        code = VectorCode(builder)
        ours = [code.at(code.load(code.at(rows, n * WORD), _WORD), offset) for n in range(LANES)]
        four = ir.VectorType(number, _FOUR)
        factors = code.load(scales) if numbers.instance_class is Int8 else None

        def put(column, lane):
            scaled = column if factors is None else builder.fmul(column, factors)
            code.store(scaled, code.at(out, builder.mul(out_stride, ir.Constant(_WORD, lane))))

        turns = range(0, HALF // together, _FOUR)
        for word in turns:
            for key in range(word // _FOUR, LANES, len(turns)):
                _emit_fetch(code, numbers, code.at(coming, key * WORD), further)
            vectors = []
            for first in range(_FOUR):
                parts = [code.load(code.at(row, word * FLOAT), four, bytes_held) for row in ours[first::_FOUR]]
                vectors.append(code.joined(parts))
            for n, column in enumerate(code.turned_quarters(vectors)):
                for place, numbers_of in enumerate([column] if apart is None else apart(code, column)):
                    put(numbers_of, together * (word + n) + place)
        return context.get_dummy_value()

    return types.void(numbers, *[types.intp] * 7), generate


@intrinsic
def _widen(typingctx, numbers, rows, offset, scales, out, out_stride):
    """Widen `HALF` lanes of `LANES` rows to rows of float32 at `out`; see `_turn` for the arguments."""
    size, number, widen = _FORMS[numbers.instance_class]

    def generate(context, builder, signature, args):
        _, rows, offset, scales, out, out_stride = args
        code = VectorCode(builder)
        for key, to in enumerate(code.rows(out, out_stride, LANES)):
            ours = code.at(code.load(code.at(rows, key * WORD), _WORD), offset)
            for lane in range(0, HALF, LANES):
                wide = widen(code, code.load(code.at(ours, lane * size), ir.VectorType(number, LANES), size))
                if numbers.instance_class is Int8:
                    wide = builder.fmul(wide, code.spread(code.load(code.at(scales, key * FLOAT), ir.FloatType())))
                code.store(wide, code.at(to, lane * FLOAT))
        return context.get_dummy_value()

    return types.void(numbers, *[types.intp] * 5), generate


@njit
def bring_keys(numbers, rows, number, offset, scales, out, coming, further):
    """Transpose `HALF` lanes of a span's first `number` rows, rounded up to `LANES`, to out [HALF, SPAN]; see `_turn`.

    Prefetches the same lanes of the rows at `coming`, `further` bytes on, a few at a time.
    """
    for key in range(0, number, LANES):
        to, theirs = out + key * FLOAT, coming + key * WORD
        _turn(numbers, rows + key * WORD, offset, scales + key * FLOAT, to, SPAN * FLOAT, theirs, further)
    fetch(numbers, coming, further, number)


@njit
def fetch(numbers, rows, offset, begin):
    """Prefetch `HALF` lanes of a span's rows from row `begin` on, rounded up to `LANES`."""
    for key in range(-(-begin // LANES) * LANES, SPAN, LANES):
        _fetch(numbers, rows + key * WORD, offset)


@njit
def bring_values(numbers, rows, number, offset, scales, out, stride):
    """Widen `HALF` lanes of a span's first `number` rows, rounded up to `LANES`, to float32 rows at `out`.

    The rows at `out` are `stride` bytes apart; see `_turn` for the other arguments.
    """
    for key in range(0, number, LANES):
        _widen(numbers, rows + key * WORD, offset, scales + key * FLOAT, out + key * stride, stride)


@njit
def float16(bits):
    """Return the positive number of a float16's bits, an int32."""
    wide = bits << np.int32(13)
    if bits < 0x400:
        return np.float32(bits) * np.float32(2.0**-24)
    return float_of_bits(wide | np.int32(0x7F800000) if bits >= 0x7C00 else wide + np.int32(112 << 23))

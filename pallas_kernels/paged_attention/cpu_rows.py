"""Brings a span's keys and values from where blocks lie into the cache, as float32, whatever a view holds them in.

Keys are turned round, so that a vector holds one lane of neighbouring keys: scores are then sums of products with whole
vectors, and none has to be added up across a vector. What lies there costs as much for one query as for hundreds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from pallas_kernels.cpu_tiles import FLOAT, LANES, LINE_BYTES, VECTOR, VectorCode
from pallas_kernels.ffi.primitives import emit_prefetch
from pallas_kernels.paged_attention.cpu_math import HALF, SPAN, WORD, float_of_bits

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
    """Widen float8_e4m3fn by its bits; a subnormal is its mantissa's number of the least one's size."""
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
    """Says how a view holds numbers, by its type: compiled code differs by it.

    Attributes:
        bytes: of a number.
    """

    bytes: int


class Float32(Numbers):
    """Numbers as they are computed with."""


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
"""Bytes and LLVM's type of a number, and what widens a vector of them."""
_OF_WORDS = {BFloat16: _bfloat16_of_words, Int8: _int8_of_words, Float8: _float8_of_words}
"""What makes float32 of words of four bytes: a vector of the first number of each, of the second, and so on."""


def _emit_fetch(code: VectorCode, numbers: types.Type, row: ir.Value, offset: ir.Value) -> None:
    """Fetch `HALF` lanes, `offset` from the address at `row` on."""
    address = code.at(code.load(row, _WORD), offset)
    for line in range(0, HALF * _FORMS[numbers.instance_class][0], LINE_BYTES):
        emit_prefetch(code.builder, code.at(address, line))


@intrinsic
def _fetch(typingctx, numbers, rows, offset):
    """Fetch `HALF` lanes of the rows at the `LANES` addresses at `rows`, `offset` from there on, for what follows."""

    def generate(context, builder, signature, args):
        _, rows, offset = args
        code = VectorCode(builder)
        for key in range(LANES):
            _emit_fetch(code, numbers, code.at(rows, key * WORD), offset)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp), generate


@intrinsic
def _turn(typingctx, numbers, rows, offset, scales, out, out_stride, coming, further):
    """Make columns at `out` of `HALF` lanes of the rows at the `LANES` addresses at `rows`, `offset` from there on,
    times the keys' numbers at `scales` if they have any.

    Parts of rows are loaded together, so that each four columns are turned within a vector's quarters. What is turned
    are words of four bytes, whatever numbers are in them. The same lanes of the rows at `coming`, `further` from there
    on, are fetched for what follows, some at a time: more than a core waits for at once would hold it up.
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
    """Make rows at `out` of `HALF` lanes of rows; see `_turn`."""
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
    """Bring `HALF` lanes of a span's first rows, `number` and some more, to the columns of out [HALF, SPAN]; see
    `_turn`. The same lanes of rows at `coming`, `further` bytes from there on, are fetched meanwhile, some at a
    time."""
    for key in range(0, number, LANES):
        to, theirs = out + key * FLOAT, coming + key * WORD
        _turn(numbers, rows + key * WORD, offset, scales + key * FLOAT, to, SPAN * FLOAT, theirs, further)
    fetch(numbers, coming, further, number)


@njit
def fetch(numbers, rows, offset, begin):
    """Fetch `HALF` lanes of a span's rows behind the first, `begin` and some more."""
    for key in range(-(-begin // LANES) * LANES, SPAN, LANES):
        _fetch(numbers, rows + key * WORD, offset)


@njit
def bring_values(numbers, rows, number, offset, scales, out, stride):
    """Bring `HALF` lanes of a span's first rows to rows at `out`, `stride` bytes apart; see `bring_keys`."""
    for key in range(0, number, LANES):
        _widen(numbers, rows + key * WORD, offset, scales + key * FLOAT, out + key * stride, stride)


@njit
def float16(bits):
    """Return the positive number of a float16's bits, an int32."""
    wide = bits << np.int32(13)
    if bits < 0x400:
        return np.float32(bits) * np.float32(2.0**-24)
    return float_of_bits(wide | np.int32(0x7F800000) if bits >= 0x7C00 else wide + np.int32(112 << 23))

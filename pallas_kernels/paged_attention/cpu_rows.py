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
from pallas_kernels.ffi_primitives import emit_prefetch
from pallas_kernels.paged_attention.cpu_math import SPAN, float_of_bits

HALF = 64
"""Lanes that share a scale, and of which heads are whole multiples."""
WORD = 8
"""Bytes of an address."""

_WORD = ir.IntType(64)
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)


def _ints(code: VectorCode, address: ir.Value, bits: int, signed: bool = False) -> ir.Value:
    narrow = code.load(address, ir.VectorType(ir.IntType(bits), LANES))
    return code.builder.sext(narrow, _INTS) if signed else code.builder.zext(narrow, _INTS)


def _constant(number: int) -> ir.Constant:
    return ir.Constant(_INTS, [number] * LANES)


def _bfloat16(code: VectorCode, address: ir.Value) -> ir.Value:
    return code.builder.bitcast(code.builder.shl(_ints(code, address, 16), _constant(16)), VECTOR)


def _int8(code: VectorCode, address: ir.Value) -> ir.Value:
    return code.builder.sitofp(_ints(code, address, 8, signed=True), VECTOR)


def _float8(code: VectorCode, address: ir.Value) -> ir.Value:
    """Widen float8_e4m3fn by its bits; a subnormal is its mantissa's number of the least one's size."""
    builder, bits = code.builder, _ints(code, address, 8)
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

_WIDENED = {Float32: (4, VectorCode.load), BFloat16: (2, _bfloat16), Int8: (1, _int8), Float8: (1, _float8)}


def _load(code: VectorCode, kind: type, address: ir.Value, scale: ir.Value) -> ir.Value:
    """Return numbers, times the scale at an address where they have one."""
    wide = _WIDENED[kind][1](code, address)
    if kind is not Int8:
        return wide
    return code.builder.fmul(wide, code.spread(code.load(scale, ir.FloatType())))


@intrinsic
def _turn(typingctx, numbers, rows, coming, scales, out, out_stride):
    """Make columns at `out` of the half rows at the `LANES` addresses that lie at `rows`, and fetch those at the
    addresses at `coming`, for what follows; `scales` is the address of the first key's."""
    kind = numbers.instance_class
    size = _WIDENED[kind][0]

    def generate(context, builder, signature, args):
        _, rows, coming, scales, out, out_stride = args
        code = VectorCode(builder)
        ours = [code.load(code.at(rows, n * WORD), _WORD) for n in range(LANES)]
        theirs = [code.load(code.at(coming, n * WORD), _WORD) for n in range(LANES)]
        for lane in range(0, HALF, LANES):
            vectors = []
            for key in range(LANES):
                vectors.append(_load(code, kind, code.at(ours[key], lane * size), code.at(scales, key * FLOAT)))
                if lane * size % LINE_BYTES == 0:
                    emit_prefetch(builder, code.at(theirs[key], lane * size))
            for n, vector in enumerate(code.transposed(vectors)):
                code.store(vector, code.at(out, builder.mul(out_stride, ir.Constant(_WORD, lane + n))))
        return context.get_dummy_value()

    return types.void(numbers, *[types.intp] * 5), generate


@intrinsic
def _widen(typingctx, numbers, rows, coming, scales, out, out_stride):
    """Make rows at `out` of half rows; see `_turn`."""
    kind = numbers.instance_class
    size = _WIDENED[kind][0]

    def generate(context, builder, signature, args):
        _, rows, coming, scales, out, out_stride = args
        code = VectorCode(builder)
        for key, to in enumerate(code.rows(out, out_stride, LANES)):
            ours, theirs = (code.load(code.at(base, key * WORD), _WORD) for base in (rows, coming))
            for lane in range(0, HALF, LANES):
                wide = _load(code, kind, code.at(ours, lane * size), code.at(scales, key * FLOAT))
                code.store(wide, code.at(to, lane * FLOAT))
                if lane * size % LINE_BYTES == 0:
                    emit_prefetch(builder, code.at(theirs, lane * size))
        return context.get_dummy_value()

    return types.void(numbers, *[types.intp] * 5), generate


@njit
def bring(numbers, rows, coming, scales, out, stride, turned):
    """Bring the half rows of a span, by the addresses that lie at `rows`, to `out`, as columns if `turned`."""
    for key in range(0, SPAN, LANES):
        ours, theirs, by = rows + key * WORD, coming + key * WORD, scales + key * FLOAT
        if turned:
            _turn(numbers, ours, theirs, by, out + key * FLOAT, stride)
        else:
            _widen(numbers, ours, theirs, by, out + key * stride, stride)


@njit
def float16(low, high):
    """Return the positive number of a float16's two bytes."""
    bits = (np.int32(high) << np.int32(8)) | np.int32(low)
    wide = bits << np.int32(13)
    if bits < 0x400:
        return np.float32(bits) * np.float32(2.0**-24)
    return float_of_bits(wide | np.int32(0x7F800000) if bits >= 0x7C00 else wide + np.int32(112 << 23))

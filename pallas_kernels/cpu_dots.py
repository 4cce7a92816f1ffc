"""Adds up products of codes and rounded numbers as integers, as LLVM instructions of each kind of processor.

A kind multiplies a tile of 64 bytes, 16 outputs by 4 inputs, with 4 numbers from -127 to 127, and adds each output's
products to its sum. Codes are unsigned, except for ``neon``, whose instruction takes signed ones (`Dots.signed`). AVX2
multiplies pairs of 16 bits: rows are held so, and many rows have tiles widened once for all (`SHORTS`, 16 outputs by 2
inputs). Codes of 4 bits in short groups need no more than 16 bits for their sums (`cpu_features.kind_for`).

Integers leave no choice of order, so all kinds give the same sums. `KINDS` says which instructions;
`cpu_features.best_kind` which of them this machine has. Kind ``amx`` is not among them, as its sums are in no vector
register: `tiled_matmul.cpu_amx` has its product of many rows, and few rows are multiplied by ``vnni512``.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from pallas_kernels.cpu_features import FEATURES, Kind

_BYTE, _SHORT, _INT, _WORD, _FLOAT = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())
INTS, FLOATS = ir.VectorType(_INT, 16), ir.VectorType(_FLOAT, 16)
"""Types in which a tile's 16 outputs are summed, and scaled."""
_CODES = ir.VectorType(_BYTE, 64)


def vector(number: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(number, lanes)


class Emitter:
    """Appends instructions that all kinds share; addresses are words."""

    def __init__(self, builder: ir.IRBuilder):
        self.builder = builder

    def load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=1)

    def at(self, base: ir.Value, *offsets: ir.Value | int) -> ir.Value:
        for offset in offsets:
            base = self.builder.add(base, ir.Constant(_WORD, offset) if isinstance(offset, int) else offset)
        return base

    def times(self, value: ir.Value, factor: int) -> ir.Value:
        return self.builder.mul(value, ir.Constant(_WORD, factor))

    def spread(self, number: ir.Value, lanes: int) -> ir.Value:
        """Return a vector whose numbers all are `number`."""
        none = ir.Constant(vector(number.type, lanes), ir.Undefined)
        first = self.builder.insert_element(none, number, ir.Constant(_INT, 0))
        return self.builder.shuffle_vector(first, none, ir.Constant(vector(_INT, lanes), [0] * lanes))

    def pick(self, value: ir.Value, lanes: range | list[int], other: ir.Value | None = None) -> ir.Value:
        """Return some numbers of a vector, or of two concatenated vectors."""
        other = ir.Constant(value.type, ir.Undefined) if other is None else other
        return self.builder.shuffle_vector(value, other, ir.Constant(vector(_INT, len(lanes)), list(lanes)))

    def joined(self, parts: list[ir.Value]) -> ir.Value:
        """Concatenate vectors."""
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [self.pick(low, range(2 * low.type.count), high) for low, high in pairs]
        return parts[0]

    def constant(self, kind: ir.VectorType, number: float) -> ir.Constant:
        return ir.Constant(kind, [number] * kind.count)

    def fused(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Return ``a * b + c`` of float32, rounded once where the processor can."""
        if FEATURES.get("fma") or FEATURES.get("neon"):
            return self.call(f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])
        return self.builder.fadd(self.builder.fmul(a, b), c)

    def call(self, name: str, result: ir.Type, arguments: list[ir.Value]) -> ir.Value:
        """Call what LLVM calls `name`."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = self.builder.module.globals.get(name) or ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)


@dataclass(frozen=True)
class Dots:
    """Says how one kind of processor multiplies a tile.

    Attributes:
        piece: a register of sums.
        pieces: how many hold the sums of a tile's 16 outputs.
        registers: how many registers there are of that size.
        number_bytes: of a row's number.
        inputs: of a tile.
    """

    kind: Kind
    piece: ir.VectorType
    pieces: int
    registers: int
    number_bytes: int = 1
    inputs: int = 4

    @property
    def signed(self) -> bool:
        """Tell whether codes are taken as numbers from -128 to 127."""
        return self.kind == "neon"

    @property
    def whole(self) -> bool:
        """Tell whether each number of a register is an output's sum, and may begin with what is to be added to it."""
        return self.kind in ("vnni512", "vnni256", "avx2 widened", "plain")

    def tile(self, emit: Emitter, codes: ir.Value) -> list[ir.Value]:
        """Return a tile's codes in the operands that `add` takes."""
        if self is SHORTS:
            both = emit.builder.bitcast(codes, vector(_SHORT, 32))
            return [emit.pick(both, range(start, start + 16)) for start in (0, 16)]
        if self.kind == "avx2":
            parts = [emit.pick(codes, range(start, start + 16)) for start in range(0, 64, 16)]
            return [emit.builder.zext(part, vector(_SHORT, 16)) for part in parts]
        if self.kind == "plain":
            places = [emit.pick(codes, range(place, 64, 4)) for place in range(4)]
            return [emit.builder.zext(part, INTS) for part in places]
        size = 64 // self.pieces
        parts = [emit.pick(codes, range(start, start + size)) for start in range(0, 64, size)] if size < 64 else [codes]
        return (
            parts
            if self.kind in ("neon", "avx2 nibbles")
            else [emit.builder.bitcast(part, self.piece) for part in parts]
        )

    def four(self, emit: Emitter, address: ir.Value) -> list[ir.Value]:
        """Return a row's numbers of a tile's inputs at an address in the operands that `add` takes."""
        if self.number_bytes == 2:
            numbers = ir.IntType(16 * self.inputs)
            return [
                emit.builder.bitcast(emit.spread(emit.load(address, numbers), 16 // self.inputs), vector(_SHORT, 16))
            ]
        if self.kind == "plain":
            wide = emit.builder.sext(emit.load(address, vector(_BYTE, 4)), vector(_INT, 4))
            return [emit.spread(emit.builder.extract_element(wide, ir.Constant(_INT, n)), 16) for n in range(4)]
        if self.kind == "avx2 nibbles":
            return [emit.builder.bitcast(emit.spread(emit.load(address, _INT), 8), vector(_BYTE, 32))]
        numbers = emit.spread(emit.load(address, _INT), self.piece.count)
        return [emit.builder.bitcast(numbers, vector(_BYTE, 16)) if self.kind == "neon" else numbers]

    def add(self, emit: Emitter, sums: list[ir.Value], tile: list[ir.Value], four: list[ir.Value]) -> list[ir.Value]:
        """Return a tile's sums with its products with a row's numbers added."""
        if self.kind == "plain":
            (total,) = sums
            for codes, number in zip(tile, four, strict=True):
                total = emit.builder.add(total, emit.builder.mul(codes, number))
            return [total]
        (numbers,) = four
        if self.kind == "avx2 nibbles":
            pairs = [emit.call("llvm.x86.avx2.pmadd.ub.sw", self.piece, [codes, numbers]) for codes in tile]
            return [emit.builder.add(total, pair) for total, pair in zip(sums, pairs, strict=True)]
        if self.number_bytes == 2:
            pairs = [emit.call("llvm.x86.avx2.pmadd.wd", self.piece, [codes, numbers]) for codes in tile]
            return [emit.builder.add(total, pair) for total, pair in zip(sums, pairs, strict=True)]
        name = {
            "vnni512": "llvm.x86.avx512.vpdpbusd.512",
            "vnni256": "llvm.x86.avx512.vpdpbusd.256",
            "neon": "llvm.aarch64.neon.sdot.v4i32.v16i8",
        }[self.kind]
        return [emit.call(name, self.piece, [s, codes, numbers]) for s, codes in zip(sums, tile, strict=True)]

    def totals(self, emit: Emitter, sums: list[ir.Value]) -> ir.Value:
        """Return a tile's sums as one vector of `INTS`."""
        if self.kind == "avx2 nibbles":
            ones, name = emit.constant(self.piece, 1), "llvm.x86.avx2.pmadd.wd"
            return emit.joined([emit.call(name, vector(_INT, 8), [pairs, ones]) for pairs in sums])
        both = emit.joined(sums)
        if self.kind != "avx2":
            return both
        return emit.builder.add(emit.pick(both, range(0, 32, 2)), emit.pick(both, range(1, 32, 2)))


KINDS: dict[Kind, Dots] = {
    "vnni512": Dots("vnni512", INTS, 1, 32),
    "vnni256": Dots("vnni256", vector(_INT, 8), 2, 16),
    "avx2": Dots("avx2", vector(_INT, 8), 4, 16, number_bytes=2),
    "avx2 widened": Dots("avx2 widened", vector(_INT, 8), 2, 16, number_bytes=2, inputs=2),
    "avx2 nibbles": Dots("avx2 nibbles", vector(_SHORT, 16), 2, 16),
    "neon": Dots("neon", vector(_INT, 4), 4, 32),
    "plain": Dots("plain", INTS, 1, 4),
}
"""``vnni512`` and ``vnni256``: vpdpbusd. ``avx2``: vpmaddwd of codes widened to 16 bits, as vpmaddubsw saturates, which
``avx2 nibbles`` takes where codes are below 16.
``neon``: sdot of ARM's dot product extension. ``plain``: what LLVM makes of multiplications on any machine."""
SHORTS = KINDS["avx2 widened"]
"""Multiplies tiles of 16 outputs by 2 inputs of 16 bits, that `cpu_shorts.widening` makes of others."""

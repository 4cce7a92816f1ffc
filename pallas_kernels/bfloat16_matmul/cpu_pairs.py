"""Adds up products of pairs of bfloat16 numbers in float32, as LLVM instructions of each kind of processor.

Every kind multiplies a tile of 32 numbers, 16 outputs by 2 inputs, with a row's pair, and adds each output's two
products to its sum. `vdpbf16ps` and ARM's `bfdot` take denormal numbers for 0 and round as they like between the two;
the kind ``widened`` multiplies float32 one after another. So kinds differ in the last bits; rows and batches do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from pallas_kernels.cpu_dots import FLOATS, INTS, Emitter, vector
from pallas_kernels.cpu_features import FEATURES
from pallas_kernels.cpu_features import PairKind as Kind

_INT, _FLOAT = ir.IntType(32), ir.FloatType()


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


@dataclass(frozen=True)
class Pairs:
    """Says how one kind of processor multiplies a tile.

    Attributes:
        piece: a register of sums.
        pieces: how many hold the sums of a tile's 16 outputs.
        rows, panels: how many rows and panels are multiplied at once with every sum in a register.
    """

    kind: Kind
    piece: ir.VectorType
    pieces: int
    rows: int
    panels: int

    def tile(self, emit: Emitter, address: ir.Value) -> list[ir.Value]:
        """Return the tile at an address in the operands that `add` takes."""
        pairs = emit.load(address, INTS)
        if self.kind == "widened":
            return list(halves(emit, pairs))
        size = 16 // self.pieces
        parts = [pairs] if size == 16 else [emit.pick(pairs, range(at, at + size)) for at in range(0, 16, size)]
        return [emit.builder.bitcast(part, vector(_BFloat(), 2 * size)) for part in parts]

    def pair(self, emit: Emitter, address: ir.Value) -> list[ir.Value]:
        """Return a row's pair at an address in the operands that `add` takes."""
        pairs = emit.spread(emit.load(address, _INT), self.piece.count)
        if self.kind == "widened":
            return list(halves(emit, pairs))
        return [emit.builder.bitcast(pairs, vector(_BFloat(), 2 * self.piece.count))]

    def add(self, emit: Emitter, sums: list[ir.Value], tile: list[ir.Value], pair: list[ir.Value]) -> list[ir.Value]:
        """Return a tile's sums with its products with a row's pair added."""
        if self.kind == "widened":
            (total,) = sums
            for numbers, number in zip(tile, pair, strict=True):
                total = emit.fused(numbers, number, total)
            return [total]
        name = (
            "llvm.x86.avx512bf16.dpbf16ps.512" if self.kind == "avx512bf16" else "llvm.aarch64.neon.bfdot.v4f32.v8bf16"
        )
        return [emit.call(name, self.piece, [s, numbers, *pair]) for s, numbers in zip(sums, tile, strict=True)]


def halves(emit: Emitter, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the first and the second numbers of pairs as float32: a bfloat16 is the upper half of one."""
    builder, floats = emit.builder, vector(_FLOAT, pairs.type.count)
    first = builder.shl(pairs, emit.constant(pairs.type, 16))
    second = builder.and_(pairs, emit.constant(pairs.type, 0xFFFF0000))
    return builder.bitcast(first, floats), builder.bitcast(second, floats)


def _widened() -> Pairs:
    """Return how pairs are multiplied by what every processor has: 32 registers of 16 numbers, or 16 of fewer."""
    return Pairs("widened", FLOATS, 1, 8, 2) if FEATURES.get("avx512f") else Pairs("widened", FLOATS, 1, 4, 1)


KINDS: dict[Kind, Pairs] = {
    "avx512bf16": Pairs("avx512bf16", FLOATS, 1, 8, 3),
    "neon": Pairs("neon", vector(_FLOAT, 4), 4, 4, 1),
    "widened": _widened(),
}
"""Kinds that add up pairs in vector registers. ``avx512bf16``: vdpbf16ps. ``neon``: bfdot of ARM's bf16 extension.
``widened``: float32, on any machine."""


def panels_at_once(kind: Kind) -> int:
    """Return how many panels one kind multiplies together; ``amx`` (`cpu_amx`) takes two."""
    return 2 if kind == "amx" else KINDS[kind].panels

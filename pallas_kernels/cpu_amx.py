"""Appends the instructions of Intel's AMX, a processor's unit for products of tiles.

A tile is a register of up to 16 rows of up to 64 bytes. A thread has eight, whose sizes `configure` reads from memory:
palette 1 in the first byte, the bytes of a tile's row from byte 16 on, two for each tile, its rows from byte 48 on.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.cpu_dots import Emitter

TILE_ROWS, ROW_BYTES = 16, 64
"""Most rows of a tile, and bytes of a row."""
CONFIG_BYTES = 64
"""Bytes of the sizes of all tiles."""

_BYTE, _NOTHING = ir.IntType(8), ir.VoidType()


class TileCode(Emitter):
    """Appends AMX's instructions; tiles are numbers, which become part of the instruction."""

    def tile(self, name: str, *operands: int | ir.Value) -> None:
        values = [ir.Constant(_BYTE, value) if isinstance(value, int) else value for value in operands]
        self.call(f"llvm.x86.{name}", _NOTHING, values)

    def load_tile(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        self.tile("tileloadd64", tile, self.builder.inttoptr(address, _BYTE.as_pointer()), stride)

    def store_tile(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        self.tile("tilestored64", tile, self.builder.inttoptr(address, _BYTE.as_pointer()), stride)


@intrinsic
def configure(typingctx, address):
    """Give the tiles of this thread the sizes at an address, `CONFIG_BYTES` of them; their numbers become 0."""

    def generate(context, builder, signature, args):
        TileCode(builder).tile("ldtilecfg", builder.inttoptr(args[0], _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def release(typingctx):
    """Give the tiles of this thread back, so that nothing has to be kept where threads take turns."""

    def generate(context, builder, signature, args):
        TileCode(builder).tile("tilerelease")
        return context.get_dummy_value()

    return types.void(), generate

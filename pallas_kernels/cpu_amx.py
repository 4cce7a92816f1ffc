"""Appends the instructions of Intel's AMX, a processor's unit for products of tiles.

A tile is a register of up to 16 rows of up to 64 bytes. `write_sizes` and `configure` give a thread's eight tiles their
sizes: 0 to 3 sums, 4 and 5 rows of x, 6 and 7 columns of a matrix.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.cpu_dots import Emitter
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import store

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
    """Give the tiles of this thread the sizes at an address, see `write_sizes`; their numbers become 0."""

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


@njit
def write_sizes(to, rows):
    """Write the sizes of tiles for up to 32 rows: palette 1, then bytes of a row at 16, rows at 48."""
    upper, lower = min(rows, TILE_ROWS), max(0, rows - TILE_ROWS)
    full, wide = TILE_ROWS, ROW_BYTES
    below = wide if lower else 0
    store(to, 1)
    store(to + 8, 0)
    store(to + 16, wide | wide << 16 | below << 32 | below << 48)
    store(to + 24, wide | below << 16 | wide << 32 | wide << 48)
    store(to + 32, 0)
    store(to + 40, 0)
    store(to + 48, upper | upper << 8 | lower << 16 | lower << 24 | upper << 32 | lower << 40 | full << 48 | full << 56)
    store(to + 56, 0)

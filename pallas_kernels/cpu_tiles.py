"""Multiplies small tiles with every sum in a register, as LLVM instructions for the machine they run on.

Sizes are chosen so that the sums of a tile, the vectors of a turn and one more fill the vector registers: 32 with
AVX-512 and on ARM, else 16. Every sum has a fixed order, whatever the tile, so a row's bits do not depend on the
other rows.

Multiplies any number of float32 rows with some vectors of columns, in the largest tiles that the rows fill.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels.cpu_features import LANES, MANY_REGISTERS
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import emit_prefetch

ROWS = 8 if MANY_REGISTERS else 4
"""Rows of x in a tile."""
VECTORS = 3
"""Vectors of columns in a tile."""
FLOAT = 4
"""Bytes of a number."""
LINE_BYTES = 64
"""Bytes of a cache line."""
DOT_ROWS, TABLE_ROWS = 2 if MANY_REGISTERS else 1, 8
"""Rows of x and of a table in a tile of dot products."""

_WORD, _FLOAT, _INDEX = ir.IntType(64), ir.FloatType(), ir.IntType(32)
VECTOR = ir.VectorType(_FLOAT, LANES)
_ZEROS = ir.Constant(VECTOR, [0.0] * LANES)
_BYTES = LANES * FLOAT


class VectorCode:
    """Appends instructions; addresses are words, strides and offsets bytes."""

    def __init__(self, builder: ir.IRBuilder):
        self.builder = builder

    def at(self, base: ir.Value, offset: ir.Value | int) -> ir.Value:
        return self.builder.add(base, ir.Constant(_WORD, offset) if isinstance(offset, int) else offset)

    def rows(self, base: ir.Value, stride: ir.Value, number: int) -> list[ir.Value]:
        """Return the addresses of `number` rows, `stride` apart."""
        return [self.at(base, self.builder.mul(stride, ir.Constant(_WORD, row))) for row in range(number)]

    def load(self, address: ir.Value, kind: ir.Type = VECTOR, align: int = FLOAT) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=FLOAT)

    def put(self, value: ir.Value, address: ir.Value, more: ir.Value) -> None:
        """Store a value; if `more` is not 0, add it to the stored one."""
        both = self.builder.fadd(self.load(address, value.type), value)
        further = self.builder.icmp_signed("!=", more, ir.Constant(_WORD, 0))
        self.store(self.builder.select(further, both, value), address)

    def spread(self, number: ir.Value) -> ir.Value:
        """Return a vector whose numbers all are `number`."""
        none = ir.Constant(VECTOR, ir.Undefined)
        first = self.builder.insert_element(none, number, ir.Constant(_INDEX, 0))
        return self.builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        kind = a.type
        return self.builder.call(self.function(f"llvm.fma.v{kind.count}f32", kind, [kind] * 3), [a, b, c])

    def totals(self, vectors: list[ir.Value]) -> ir.Value:
        """Return the sums over each of the vectors, as one vector; they are a power of two, no more than they have
        lanes."""
        return self.folded(vectors, self.builder.fadd)

    def folded(self, vectors: list[ir.Value], operation: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Do the same as `totals` with another operation than a sum."""
        segment, out = LANES, list(vectors)
        while segment > LANES // len(vectors):
            out = [self._halved(segment, operation, a, b) for a, b in zip(out[::2], out[1::2], strict=True)]
            segment //= 2
        (one,) = out
        while segment > 1:
            one = self._halved(segment, operation, one)
            segment //= 2
        return one

    def _halved(
        self, segment: int, operation: Callable[[ir.Value, ir.Value], ir.Value], *vectors: ir.Value
    ) -> ir.Value:
        """Join each segment's lower half with its upper half; returns halves of the first vector, then of the
        second."""
        lanes = vectors[0].type.count
        lower = [lane for lane in range(len(vectors) * lanes) if lane % segment < segment // 2]
        halves = []
        for shift in (0, segment // 2):
            mask = ir.Constant(ir.VectorType(_INDEX, len(lower)), [lane + shift for lane in lower])
            halves.append(self.builder.shuffle_vector(vectors[0], vectors[-1], mask))
        return operation(*halves)

    def joined(self, vectors: list[ir.Value]) -> ir.Value:
        """Concatenate vectors; their number is a power of two."""
        while len(vectors) > 1:
            mask = ir.Constant(ir.VectorType(_INDEX, 2 * vectors[0].type.count), list(range(2 * vectors[0].type.count)))
            vectors = [
                self.builder.shuffle_vector(a, b, mask) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    def turned_quarters(self, rows: list[ir.Value]) -> list[ir.Value]:
        """Transpose each 4 x 4 block, the same quarter of four vectors; returns the columns as four vectors."""

        def pick(a: ir.Value, b: ir.Value, *lanes: int) -> ir.Value:
            """Take two lanes of each four of a, and two of b's."""
            mask = [
                start + lane + (LANES if n in b_lanes else 0)
                for start in range(0, LANES, 4)
                for n, lane in enumerate(lanes)
            ]
            return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INDEX, LANES), mask))

        b_lanes = (1, 3)
        low, high = (pick(rows[0], rows[1], *lanes) for lanes in ((0, 0, 1, 1), (2, 2, 3, 3)))
        low_2, high_2 = (pick(rows[2], rows[3], *lanes) for lanes in ((0, 0, 1, 1), (2, 2, 3, 3)))
        b_lanes = (2, 3)
        return [
            pick(*pair, *lanes) for pair in ((low, low_2), (high, high_2)) for lanes in ((0, 1, 0, 1), (2, 3, 2, 3))
        ]

    def function(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        """Return a function that the machine or LLVM has."""
        return cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(result, arguments), name)

    def by_number(self, number: ir.Value, most: int, emit: Callable[[int], None]) -> None:
        """Append ``emit(n)`` for each n from `most` to 1, of which that runs whose n is `number`.

        Sums stay in registers, which have no index, so code for n rows is its own; one branch picks it.
        """
        for n in range(most, 0, -1):
            with self.builder.if_then(self.builder.icmp_signed("==", number, ir.Constant(_WORD, n))):
                emit(n)

    def sums(self, turns: ir.Value, number: int, turn: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]) -> list:
        """Repeat ``turn(counter, sums) -> sums`` at least once, from zeros."""
        return self.turns(turns, [_ZEROS] * number, turn)

    def turns(
        self, turns: ir.Value, start: list[ir.Value], turn: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]
    ) -> list:
        """Do the same as `sums`, but start from the vectors `start`."""
        builder, before = self.builder, self.builder.block
        loop, after = builder.append_basic_block("turn"), builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        counter = builder.phi(_WORD)
        sums = [builder.phi(VECTOR) for _ in start]
        added = turn(counter, sums)
        following = self.at(counter, 1)
        counter.add_incoming(ir.Constant(_WORD, 0), before)
        counter.add_incoming(following, loop)
        for phi, first, later in zip(sums, start, added, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, loop)
        builder.cbranch(builder.icmp_signed("<", following, turns), loop, after)
        builder.position_at_end(after)
        return added


def tile(rows: int, vectors: int, *, pack: bool = False, fetch: int = 0) -> Any:
    """Return ``f(x, x_stride, w, w_stride, depth, out, out_stride, more, aside, aside_stride)``, to be called from
    compiled loops.

    out [rows, vectors * LANES] gets, or with `more` is added to, the product of x [rows, depth] and w [depth, same].
    Addresses and strides are in bytes. `aside` points to `depth` rows of memory, `aside_stride` apart: with `pack`, w
    is copied there; with `fetch`, so many lines of each row are prefetched.
    """

    @intrinsic
    def product(typingctx, x, x_stride, w, w_stride, depth, out, out_stride, more, aside, aside_stride):
        def generate(context, builder, signature, args):
            _emit_tile(VectorCode(builder), rows, vectors, *args, pack=pack, fetch=fetch)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 10), generate

    return product


def tile_by_rows(most: int, vectors: int) -> Any:
    """Return ``f(rows, x, x_stride, w, w_stride, depth, out, out_stride)``, to be called from compiled loops: `tile`
    for 1 to `most` rows."""

    @intrinsic
    def product(typingctx, rows, x, x_stride, w, w_stride, depth, out, out_stride):
        def generate(context, builder, signature, args):
            code, unused = VectorCode(builder), [ir.Constant(_WORD, 0)] * 3
            code.by_number(args[0], most, lambda number: _emit_tile(code, number, vectors, *args[1:], *unused))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return product


def _emit_tile(
    code: VectorCode, rows: int, vectors: int, *arguments: ir.Value, pack: bool = False, fetch: int = 0
) -> None:
    """Append the instructions of `tile`."""
    x, x_stride, w, w_stride, depth, out, out_stride, more, aside, aside_stride = arguments
    builder, x_rows = code.builder, code.rows(x, x_stride, rows)

    # One turn is one input: its row of w, `vectors` vectors, is multiplied by that input of every row of x. The
    # rows * vectors sums stay in registers from turn to turn.
    def turn(position: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        row = code.at(w, builder.mul(position, w_stride))
        columns = [code.load(code.at(row, n * _BYTES)) for n in range(vectors)]
        beside = code.at(aside, builder.mul(position, aside_stride))
        for n, vector in enumerate(columns if pack else ()):
            code.store(vector, code.at(beside, n * _BYTES))
        for line in range(fetch):
            emit_prefetch(builder, code.at(beside, line * LINE_BYTES))
        offset = builder.mul(position, ir.Constant(_WORD, FLOAT))
        added: list[ir.Value] = []
        for m, x_row in enumerate(x_rows):
            number = code.spread(code.load(code.at(x_row, offset), _FLOAT))
            added += [code.fma(number, vector, sums[vectors * m + n]) for n, vector in enumerate(columns)]
        return added

    sums = code.sums(depth, rows * vectors, turn)
    for m, out_row in enumerate(code.rows(out, out_stride, rows)):
        for n in range(vectors):
            code.put(sums[vectors * m + n], code.at(out_row, n * _BYTES), more)


def dots(rows: int, table_rows: int, *, fetch: int = 0) -> Any:
    """Return ``f(x, x_stride, table, table_stride, length, out, out_stride, more, coming)``, to be called from compiled
    loops.

    out [rows, table_rows] gets, or with `more` is added to, the product of x [rows, length] and the transpose of table
    [table_rows, length]. Length is a multiple of `LANES`; addresses and strides are in bytes. `fetch` rows of the
    table at `coming` are prefetched.
    """

    @intrinsic
    def product(typingctx, x, x_stride, table, table_stride, length, out, out_stride, more, coming):
        def generate(context, builder, signature, args):
            x, x_stride, table, table_stride, length, out, out_stride, more, coming = args
            code = VectorCode(builder)
            x_rows, t_rows = code.rows(x, x_stride, rows), code.rows(table, table_stride, table_rows)
            following = code.rows(coming, table_stride, fetch)

            # One turn is a vector of inputs. Sums are vectors too, one for each pair of rows; their lanes are added up
            # once, after the loop.
            def turn(counter, sums):
                offset = builder.mul(counter, ir.Constant(_WORD, _BYTES))
                for row in following:
                    emit_prefetch(builder, code.at(row, offset))
                ours = [code.load(code.at(row, offset)) for row in x_rows]
                added = list(sums)
                for t, row in enumerate(t_rows):
                    vector = code.load(code.at(row, offset))
                    for m, mine in enumerate(ours):
                        added[m * table_rows + t] = code.fma(mine, vector, sums[m * table_rows + t])
                return added

            turns = builder.sdiv(length, ir.Constant(_WORD, LANES))
            sums = code.sums(turns, rows * table_rows, turn)
            for m, out_row in enumerate(code.rows(out, out_stride, rows)):
                mine = sums[m * table_rows : (m + 1) * table_rows]
                parts = [code.totals(mine[start : start + LANES]) for start in range(0, table_rows, LANES)]
                for n, part in enumerate(parts):
                    code.put(part, code.at(out_row, n * _BYTES), more)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), generate

    return product


@intrinsic(prefer_literal=True)
def stack_memory(typingctx, size):
    """Return the address of `size` bytes (a literal) of stack memory, valid until the function returns."""
    length = size.literal_value

    def generate(context, builder, signature, args):
        with builder.goto_entry_block():
            memory = builder.alloca(ir.IntType(8), ir.Constant(_WORD, length))
        return builder.ptrtoint(memory, _WORD)

    return types.intp(size), generate


@cache
def remaining_rows(vectors: int) -> Any:
    """Return ``f(x, x_stride, row, rows, w, w_stride, depth, out, out_stride, more)``, to be called from compiled
    loops.

    Rows of x from `row` to `rows` are multiplied; all else is as for `pallas_kernels.cpu_tiles.tile`.
    """
    full, four, two, one = (tile(rows, vectors) for rows in (ROWS, 4, 2, 1))

    @njit
    def remaining(x, x_stride, row, rows, w, w_stride, depth, out, out_stride, more):
        while rows - row >= ROWS:
            full(x + row * x_stride, x_stride, w, w_stride, depth, out + row * out_stride, out_stride, more, 0, 0)
            row += ROWS
        while rows - row >= 4:
            four(x + row * x_stride, x_stride, w, w_stride, depth, out + row * out_stride, out_stride, more, 0, 0)
            row += 4
        while rows - row >= 2:
            two(x + row * x_stride, x_stride, w, w_stride, depth, out + row * out_stride, out_stride, more, 0, 0)
            row += 2
        if row < rows:
            one(x + row * x_stride, x_stride, w, w_stride, depth, out + row * out_stride, out_stride, more, 0, 0)

    return remaining

"""Adds operations that Numba lacks, as LLVM instructions: raw memory, atomic addition, C functions called by
address."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTES = ir.IntType(8).as_pointer()
_WORD = ir.IntType(64)


def _words(builder, address):
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def pointer(typingctx, address):
    """Return an address as a ``void *``."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], _BYTES)

    return types.voidptr(types.intp), generate


@intrinsic
def load(typingctx, address):
    """Return the word at an address."""

    def generate(context, builder, signature, args):
        return builder.load(_words(builder, args[0]))

    return types.intp(types.intp), generate


@intrinsic
def byte(typingctx, address):
    """Return the byte at an address."""

    def generate(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], _BYTES))

    return types.uint8(types.intp), generate


@intrinsic
def load_int(typingctx, address):
    """Return the int32 at an address, as a word."""

    def generate(context, builder, signature, args):
        number = ir.IntType(32)
        return builder.sext(builder.load(builder.inttoptr(args[0], number.as_pointer())), _WORD)

    return types.intp(types.intp), generate


@intrinsic
def store(typingctx, address, value):
    """Set the word at an address."""

    def generate(context, builder, signature, args):
        builder.store(args[1], _words(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def add(typingctx, address, value):
    """Add to the word at an address, atomically; returns what it was before. Orders memory as a lock would."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", _words(builder, args[0]), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def allocate(typingctx, size):
    """Allocate `size` bytes with ``malloc`` and return their address."""

    def generate(context, builder, signature, args):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_BYTES, [_WORD]), "malloc")
        return builder.ptrtoint(builder.call(function, args), _WORD)

    return types.intp(types.intp), generate


@intrinsic
def free(typingctx, address):
    """Free memory of `allocate`."""

    def generate(context, builder, signature, args):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [_BYTES]), "free")
        builder.call(function, [builder.inttoptr(args[0], _BYTES)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def emit_prefetch(builder, address):
    """Append the instruction that brings the cache line of an address, which may be any, into the second cache."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, level, data = (ir.Constant(number, value) for value in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, _BYTES), read, level, data])


@intrinsic
def prefetch(typingctx, address):
    """Bring the cache line of an address, which may be any, into the second cache while other work goes on."""

    def generate(context, builder, signature, args):
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def call_with(typingctx, function, argument):
    """Call a C function of one word that returns one."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(_WORD, [_WORD]).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), [args[1]])

    return types.intp(types.intp, types.intp), generate


@intrinsic
def run_range(typingctx, function, frame, begin, end):
    """Call a C function of three words that returns nothing."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 3).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), args[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


@intrinsic(prefer_literal=True)
def address_of(typingctx, name):
    """Return the address of a symbol that `llvmlite.binding.add_symbol` made known; looked up when the code is
    loaded."""
    symbol = name.literal_value

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_WORD])
        return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, symbol), _WORD)

    return types.intp(name), generate

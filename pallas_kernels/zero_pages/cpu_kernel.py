"""Zeroes by unmapping, compiled by Numba: whole pages are returned to Linux, and the rest is overwritten with zeros."""

from __future__ import annotations

import mmap

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels import ffi
from pallas_kernels.ffi import address, argument, data, elements, result
from pallas_kernels.ffi.loops import njit
from pallas_kernels.zero_pages import DONT_NEED

LARGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""The advice after which Linux may map memory in pages of two megabytes: a processor remembers where far more of it
lies. A first write then takes as much at once."""

_LARGE = -1 if LARGE is None else int(LARGE)
_ADVICE = -1 if DONT_NEED is None else int(DONT_NEED)
_OS_PAGE = mmap.PAGESIZE


@intrinsic
def _set_zeros(typingctx, start, size):
    """Call ``memset`` with zeros."""

    def generate(context, builder, signature, args):
        byte = ir.IntType(8)
        cgutils.memset(builder, builder.inttoptr(args[0], byte.as_pointer()), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def _madvise(typingctx, start, size, advice):
    """Call ``madvise``; returns 0 if it did what was asked."""

    def generate(context, builder, signature, args):
        word, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(number, [word, word, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "madvise")
        failed = builder.call(function, [args[0], args[1], builder.trunc(args[2], number)])
        return builder.sext(failed, word)

    return types.intp(types.intp, types.intp, types.intp), generate


@njit
def _zero(start, size):
    """Zero `size` bytes; memory is given back in whole pages of the system."""
    stop = start + size
    first, last = -(-start // _OS_PAGE) * _OS_PAGE, stop // _OS_PAGE * _OS_PAGE
    # Locked memory, as after `mlockall`, is not given back.
    if _ADVICE < 0 or first >= last or _madvise(first, last - first, _ADVICE) != 0:
        _set_zeros(start, size)
        return
    _set_zeros(start, first - start)
    _set_zeros(last, stop - last)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _zeros(frame, begin, end):
    item_bytes, array = carray(data(argument(frame, 0)), (1,), np.int32)[0], result(frame, 0)
    start, size = address(array), elements(array) * item_bytes
    _zero(start, size)
    first, last = -(-start // _OS_PAGE) * _OS_PAGE, (start + size) // _OS_PAGE * _OS_PAGE
    if _LARGE >= 0 and first < last:
        _madvise(first, last - first, _LARGE)  # without it all is as it was


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _zero_pages(frame, begin, end):
    item_bytes, pages = carray(data(argument(frame, 0)), (1,), np.int32)[0], result(frame, 0)
    number = elements(argument(frame, 2))
    unused = carray(data(argument(frame, 2)), (number,), np.bool_)
    page_bytes = elements(pages) // number * item_bytes
    page = 0
    while page < number:
        stop = page
        while stop < number and unused[stop]:
            stop += 1
        if stop > page:
            _zero(address(pages) + page * page_bytes, (stop - page) * page_bytes)
        page = stop + 1


@ffi.known_again
def zeros_target() -> str:
    """Return the name of the custom call (bytes of an element) -> array."""
    ffi.register("jpaged_zeros", _zeros, items_of=((0, 0),))
    return "jpaged_zeros"


@ffi.known_again
def zero_pages_target() -> str:
    """Return the name of the custom call (bytes of an element, pages, unused) -> pages, which are the argument."""
    ffi.register("jpaged_zero_pages", _zero_pages, items_of=((0, 0),))
    return "jpaged_zero_pages"

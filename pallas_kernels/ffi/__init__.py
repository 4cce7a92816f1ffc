"""Lets XLA on CPU call loops that Numba compiles, through its foreign function interface, on XLA's own threads.

A handler is a C function that takes the address of an ``XLA_FFI_CallFrame`` and returns 0 or an error.
`handlers.register` makes one of loops over items; `call_frame` reads what it is called with, `primitives` adds what
Numba's Python lacks, `loops` compiles. Import this package only where Numba is installed; `pallas_kernels.custom_calls`
does so where it must.
"""

from pallas_kernels.ffi.call_frame import address, argument, arguments, data, dimension, elements, result
from pallas_kernels.ffi.handlers import RUN, known_again, register
from pallas_kernels.ffi.loops import add_symbol, cfunc, code_of

__all__ = [
    "RUN",
    "add_symbol",
    "address",
    "argument",
    "arguments",
    "cfunc",
    "code_of",
    "data",
    "dimension",
    "elements",
    "known_again",
    "register",
    "result",
]

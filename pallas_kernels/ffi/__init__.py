"""Lets XLA on CPU call loops that Numba compiles, through its foreign function interface, on XLA's own threads.

A handler is a C function that takes the address of an ``XLA_FFI_CallFrame`` and returns 0 or an error.
`handlers.register` makes one of loops over items; `call_frame` reads what it is called with, `primitives` adds what
Numba's Python lacks, `kept_code` keeps what was compiled on disk. Import this package only where Numba is installed;
`pallas_kernels.custom_calls` does so where it must.
"""

from pallas_kernels.custom_calls import known_again
from pallas_kernels.ffi.call_frame import address, argument, arguments, data, dimension, elements, result
from pallas_kernels.ffi.handlers import RUN, add_symbol, compiled, register, register_handler
from pallas_kernels.ffi.kept_code import cache_folder, cfunc, closure, named, njit_named

__all__ = [
    "RUN",
    "add_symbol",
    "address",
    "argument",
    "arguments",
    "cache_folder",
    "cfunc",
    "closure",
    "compiled",
    "data",
    "dimension",
    "elements",
    "known_again",
    "named",
    "njit_named",
    "register",
    "register_handler",
    "result",
]

"""What a loop calls is compiled as a part of it, and nothing else that Numba compiles is changed."""

import ctypes

import numba
import numpy as np
import pytest
from numba import carray, types
from numba.core.registry import cpu_target

from pallas_kernels import ffi
from pallas_kernels.ffi.helpers import as_parts_of, njit
from pallas_kernels.ffi.primitives import pointer

CODEGEN = cpu_target.target_context.codegen()


def test_a_helper_is_a_part_of_the_loop_that_calls_it():
    @njit
    def largest(numbers):
        return np.maximum(np.max(numbers), 3)

    @ffi.cfunc(types.intp(types.intp, types.intp))
    def loop(address, size):
        return largest(carray(pointer(address), (size,), np.int64))

    run = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_ssize_t)(loop.address)
    for numbers in (np.array([5, -1, 9]), np.array([1, 2])):
        assert run(numbers.ctypes.data, numbers.size) == max(3, *numbers)
    (compiled,) = largest.overloads.values()
    assert not CODEGEN._engine.is_symbol_defined(compiled.fndesc.llvm_func_name)


def test_functions_that_share_a_helper_with_a_loop_have_code_of_their_own():
    @njit
    def squared(number):
        return number * number

    @ffi.cfunc(types.intp(types.intp))
    def loop(number):
        return squared(number)

    @numba.njit
    def of_a_user(number):
        return squared(number) + min(number, 4)

    assert ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_ssize_t)(loop.address)(7) == 49
    assert of_a_user(7) == 53


def test_afterwards_functions_are_compiled_as_before():
    with pytest.raises(ZeroDivisionError), as_parts_of("nothing"):
        raise ZeroDivisionError

    @numba.njit
    def half(number):
        return number // 2

    assert half(9) == 4

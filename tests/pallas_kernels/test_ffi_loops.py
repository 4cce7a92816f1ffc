"""Loops are compiled with all that they call, need nothing of Numba, and change nothing else that Numba compiles."""

import ctypes
from itertools import count

import numba
import numpy as np
import pytest
from llvmlite import binding
from numba import carray, types
from numba.core.registry import cpu_target

from pallas_kernels import build_objects, cpu_objects, ffi
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import address_of, call_with, pointer

CODEGEN = cpu_target.target_context.codegen()
NUMBERS = count()
ALIVE = []
"""Engines that own the code of `loaded`."""


def loaded(loop, words, *bound):
    """Return a loop as a function that Python can call, made as XLA's calls are."""
    name = f"loop_of_a_test_{next(NUMBERS)}"
    ffi.add_symbol(name, loop, *bound)
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(ffi.code_of([name])))
    engine.finalize_object()
    ALIVE.append(engine)
    word = ctypes.c_ssize_t
    return ctypes.CFUNCTYPE(word, *[word] * words)(engine.get_function_address(name))


def test_a_helper_is_a_part_of_the_loop_that_calls_it():
    @njit
    def largest(numbers):
        found = numbers[0]
        for number in numbers:
            found = max(found, number)
        return np.maximum(found, 3)

    @ffi.cfunc(types.intp(types.intp, types.intp))
    def loop(address, size):
        return largest(carray(pointer(address), (size,), np.int64))

    run = loaded(loop, 2)
    for numbers in (np.array([5, -1, 9]), np.array([1, 2])):
        assert run(numbers.ctypes.data, numbers.size) == max(3, *numbers)
    (compiled,) = largest.overloads.values()
    assert not CODEGEN._engine.is_symbol_defined(compiled.fndesc.llvm_func_name)


def test_functions_of_one_name_are_not_mixed_up():
    def adds(number):
        @njit
        def more(x):
            return x + number

        return more

    one, ten = adds(1), adds(10)

    @ffi.cfunc(types.intp(types.intp))
    def loop(x):
        return ten(one(x))

    assert loaded(loop, 1)(5) == 16


def test_a_loop_is_given_numbers_and_addresses_of_others():
    @ffi.cfunc(types.intp(types.intp))
    def doubled(x):
        return 2 * x

    @ffi.cfunc(types.intp(types.intp, types.intp, types.intp))
    def loop(x, number, other):
        return number + call_with(other, x) + call_with(address_of("doubled_of_a_test"), x)

    ffi.add_symbol("doubled_of_a_test", doubled)
    assert loaded(loop, 1, 100, "doubled_of_a_test")(5) == 120


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

    assert loaded(loop, 1)(7) == 49
    assert of_a_user(7) == 53


def test_after_a_loop_that_numba_refuses_functions_are_compiled_as_before():
    @ffi.cfunc(types.intp(types.intp))
    def refused(number):
        return number.of_no_such_name

    with pytest.raises(numba.TypingError, match="of_no_such_name"):
        loaded(refused, 1)

    @numba.njit
    def half(number):
        return number // 2

    assert half(9) == 4


def test_a_loop_that_needs_numbas_run_time_is_refused():
    @ffi.cfunc(types.intp(types.intp))
    def allocating(number):
        numbers = np.empty(number)
        numbers[number // 2] = 1.0
        return int(numbers.sum())

    with pytest.raises(ValueError, match="when they run: they need Numba"):
        loaded(allocating, 1)


@pytest.mark.parametrize(
    ("name", "machine"), [("x86-64-v3", 62), ("x86-64-amx", 62), ("aarch64-dotprod", 183)]
)  # e_machine of ELF
def test_objects_for_another_processor_are_for_its_architecture(name, machine):
    @ffi.cfunc(types.intp(types.intp))
    def loop(x):
        return x + 1

    ffi.add_symbol("loop_for_another", loop)
    code = ffi.code_of(["loop_for_another"], build_objects.machine_for(cpu_objects.PROCESSORS[name]))
    assert code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == machine

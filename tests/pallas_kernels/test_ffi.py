"""Compiled loops as custom calls: the offsets they rely on, and work shared by threads."""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numba import carray

from pallas_kernels import ffi, kept_objects
from pallas_kernels.ffi import call_frame

HEADER = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
WORD = 8
SIZES = {"XLA_FFI_Api_Version": 24, "XLA_FFI_Args": 40, "XLA_FFI_Rets": 40, "XLA_FFI_Attrs": 48}


def offsets(struct):
    """Offset of each field of a structure of the installed jaxlib's header: words, but for those in `SIZES`."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}}", HEADER.read_text(), re.DOTALL)[1]
    body = re.sub(r"//.*", "", body)
    at, found = 0, {}
    for field in body.replace("_XLA_FFI_API_STRUCT_FIELD(", "function ").replace(")", "").split(";"):
        if field.strip():
            kind, name = re.fullmatch(r"(.*?)(\w+)", field.strip(), re.DOTALL).groups()
            found[name] = at
            at += SIZES.get(kind.strip(), WORD)
    return found


def test_offsets_are_those_of_the_installed_header():
    frame = offsets("XLA_FFI_CallFrame")
    assert [frame["api"], frame["ctx"]] == [call_frame.API, call_frame.CONTEXT]
    assert frame["args"] + offsets("XLA_FFI_Args")["args"] == call_frame._ARGUMENTS
    assert frame["args"] + offsets("XLA_FFI_Args")["size"] == call_frame._NUM_ARGUMENTS
    assert frame["rets"] + offsets("XLA_FFI_Rets")["rets"] == call_frame._RESULTS
    assert frame["future"] == call_frame.FUTURE
    buffer = offsets("XLA_FFI_Buffer")
    assert [buffer["data"], buffer["dims"]] == [call_frame._DATA, call_frame._DIMENSIONS]
    api = offsets("XLA_FFI_Api")
    functions = ["XLA_FFI_Error_Destroy", "XLA_FFI_ThreadPool_Schedule", "XLA_FFI_ThreadPool_NumThreads"]
    assert [api[name] for name in functions] == [call_frame._ERROR_DESTROY, call_frame.SCHEDULE, call_frame.NUM_THREADS]
    assert list(offsets("XLA_FFI_ThreadPool_Schedule_Args"))[2:] == ["ctx", "task", "data"]
    futures = [api["XLA_FFI_Future_Create"], api["XLA_FFI_Future_SetAvailable"]]
    assert futures == [call_frame.FUTURE_CREATE, call_frame.FUTURE_SET_AVAILABLE]
    for function in ("Create", "SetAvailable"):
        assert list(offsets(f"XLA_FFI_Future_{function}_Args"))[2:] == ["future"]


@cache
def increment():
    """A custom call that adds 1 to each of its int32 elements, an item each."""

    @ffi.cfunc(ffi.RUN)
    def run(frame, begin, end):
        length = ffi.dimension(ffi.argument(frame, 0), 0)
        source = carray(ffi.data(ffi.argument(frame, 0)), (length,), np.int32)
        target = carray(ffi.data(ffi.result(frame, 0)), (length,), np.int32)
        for i in range(begin, end):
            target[i] = source[i] + 1

    ffi.register("jpaged_test_increment", run, items_of=((0, 0),))
    kept_objects.load("jpaged_test_increment", ffi.code_of(["jpaged_test_increment"]))

    def call(x):
        return jax.ffi.ffi_call("jpaged_test_increment", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    return call


@pytest.mark.parametrize("items", [0, 1, 7, 100_000])
def test_every_item_is_computed_once(items):
    out = jax.jit(lambda x: lax.fori_loop(0, 50, lambda _, y: increment()(y), x))(jnp.arange(items, dtype=jnp.int32))
    np.testing.assert_array_equal(out, np.arange(items) + 50)


def test_calls_of_several_programs_at_once_do_not_disturb_each_other():
    program = jax.jit(lambda x: lax.fori_loop(0, 200, lambda _, y: increment()(y), x))
    inputs = [jnp.full(500 + i % 2, i, jnp.int32) for i in range(24)]
    with ThreadPoolExecutor(6) as threads:
        for i, out in enumerate(threads.map(program, inputs)):
            np.testing.assert_array_equal(out, np.full(500 + i % 2, i + 200))


def test_engines_made_in_several_threads_at_once_register_a_target_once():
    made, together = [], Barrier(8)

    @ffi.known_again
    def target():
        made.append("jpaged_test_threads")

        @ffi.cfunc(ffi.RUN)
        def run(frame, begin, end):
            pass

        ffi.register("jpaged_test_threads", run, items_of=((0, 0),))
        return "jpaged_test_threads"

    def register(_):
        together.wait()
        return target()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(register, range(8))) == ["jpaged_test_threads"] * 8
    assert len(made) == 1


def test_items_of_several_axes_and_those_before_them_are_all_computed():
    @ffi.cfunc(ffi.RUN)
    def before(frame, begin, end):
        seen = carray(ffi.data(ffi.result(frame, 1)), (end,), np.int32)
        for i in range(begin, end):
            seen[i] = 1

    @ffi.cfunc(ffi.RUN)
    def run(frame, begin, end):
        whole = ffi.argument(frame, 0)
        first, rows = ffi.argument(frame, 1), ffi.dimension(whole, 0) * ffi.dimension(whole, 2)
        seen = carray(ffi.data(ffi.result(frame, 1)), (ffi.dimension(first, 0),), np.int32)
        target = carray(ffi.data(ffi.result(frame, 0)), (rows,), np.int32)
        for i in range(3 * begin, min(3 * end, rows)):
            target[i] = seen.sum()

    name = "jpaged_test_axes"
    ffi.register(name, run, items_of=((0, 0), (0, 2)), portion=3, before=(before, 1, 0))
    kept_objects.load(name, ffi.code_of([name]))
    x, first = jnp.zeros((7, 5, 11)), jnp.zeros(30)
    like = jax.ShapeDtypeStruct((77,), jnp.int32), jax.ShapeDtypeStruct((30,), jnp.int32)
    out, _ = jax.ffi.ffi_call(name, like)(x, first)
    np.testing.assert_array_equal(out, np.full(77, 30))

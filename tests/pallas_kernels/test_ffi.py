"""Compiled loops as custom calls: the offsets they rely on, and work shared by threads."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest
from jax import lax
from numba import carray

from pallas_kernels import ffi
from pallas_kernels.ffi import call_frame, handlers, kept_code

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

    @numba.cfunc(ffi.RUN)
    def run(frame, begin, end):
        length = ffi.dimension(ffi.argument(frame, 0), 0)
        source = carray(ffi.data(ffi.argument(frame, 0)), (length,), np.int32)
        target = carray(ffi.data(ffi.result(frame, 0)), (length,), np.int32)
        for i in range(begin, end):
            target[i] = source[i] + 1

    ffi.register("jpaged_test_increment", run, items_of=((0, 0),))

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
    @numba.cfunc(ffi.RUN)
    def run(frame, begin, end):
        pass

    together = Barrier(8)

    def register(_):
        together.wait()
        ffi.register("jpaged_test_threads", run, items_of=((0, 0),))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(register, range(8))) == [None] * 8


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError(28, "No space left on device")])
def test_where_nothing_can_be_kept_the_code_is_compiled_all_the_same(monkeypatch, caplog, error):
    plain = numba.cfunc

    def cfunc(signature, cache=False, **options):
        if cache:
            raise error
        return plain(signature, **options)

    monkeypatch.setattr(kept_code.numba, "cfunc", cfunc)

    @ffi.cfunc("int64(int64)")
    def double(x):
        return 2 * x

    assert double.ctypes(4) == 8
    assert "NUMBA_CACHE_DIR chooses a folder" in caplog.text


def test_compiled_code_is_kept_until_a_file_of_the_package_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for fingerprint, hits in (("before", 0), ("after", 0), ("before", 1)):
        monkeypatch.setattr(kept_code, "_fingerprint", lambda name=fingerprint: name)

        @ffi.cfunc("int64(int64)")
        def double(x):
            return 2 * x

        assert (double.ctypes(4), double.cache_hits) == (8, hits)
        assert list((tmp_path / fingerprint).rglob("*.nbc"))
    assert str(tmp_path) == numba.config.CACHE_DIR


def test_functions_made_twice_have_symbols_of_their_own():
    """Kept on disk by different processes, they may have the same number behind their names."""

    @numba.cfunc(ffi.RUN)
    def nothing(frame, begin, end):
        pass

    made = [handlers._handler(name, nothing, ((0, 0),), 1, 1, (nothing, -1, 0)) for name in ("once", "twice")]
    symbols = [re.sub(r"\d", "", handler.native_name) for handler in made]
    assert symbols[0] != symbols[1]


def test_loops_that_are_made_several_times_are_compiled_by_names_of_their_own():
    """`numba.njit` gives two of them, kept on disk by two processes, one symbol: see `ffi.named`."""
    package, bare = Path(ffi.__file__).parents[1], []
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        outer = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        within = [node for one in outer for node in ast.walk(one) if node is not one]
        for node in within:
            if isinstance(node, ast.FunctionDef):
                bare += [
                    f"{file.name}: {node.name}" for by in map(ast.unparse, node.decorator_list) if by.startswith("njit")
                ]
            elif isinstance(node, ast.Call) and node.args and re.match(r"(numba\.)?njit\b", ast.unparse(node.func)):
                bare += [] if "named(" in ast.unparse(node) else [f"{file.name}: {ast.unparse(node)}"]
    assert not bare

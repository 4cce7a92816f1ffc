"""Compiled loops as custom calls: the offsets they rely on, and work shared by threads."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier
from types import FunctionType

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


@pytest.fixture
def small_package(tmp_path, monkeypatch):
    """Files of a package in place of this one's: loops.py imports used.py, which imports deep.py in a function."""
    for name in ("_source", "_imports", "_fingerprint"):
        getattr(kept_code, name).cache_clear()
    monkeypatch.setattr(kept_code, "_ROOT", tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    package = tmp_path / "pallas_kernels"
    package.mkdir()
    (package / "loops.py").write_text("from pallas_kernels.used import (\n    one,\n    two,\n)\n")
    (package / "used.py").write_text("def one():\n    from pallas_kernels import deep, three\n")
    for name in ("deep", "made", "unrelated"):
        (package / f"{name}.py").write_text("")
    yield package
    for name in ("_source", "_imports", "_fingerprint"):
        getattr(kept_code, name).cache_clear()


def edit(file):
    file.write_text(file.read_text() + "# edited\n")
    for name in ("_source", "_imports", "_fingerprint"):
        getattr(kept_code, name).cache_clear()


def twice_more(x):
    return 2 * _add_one(x)  # noqa: F821 - a global name that each function made of this code gets


def compiled_again():
    """Compile a function of loops.py that calls one of made.py, and tell whether it was not kept."""

    @numba.njit
    def add_one(x):
        return x + 1

    add_one.__module__ = "pallas_kernels.made"
    double = FunctionType(twice_more.__code__, {"_add_one": add_one, "__name__": "pallas_kernels.loops"}, "double")
    made = ffi.cfunc("int64(int64)")(double)
    assert made.ctypes(4) == 10
    return made.cache_hits == 0


def test_compiled_code_is_kept_until_a_file_changes_that_it_is_made_from(small_package):
    assert compiled_again() and not compiled_again()
    edit(small_package / "unrelated.py")
    assert not compiled_again()
    for name in ("loops", "used", "deep", "made"):
        edit(small_package / f"{name}.py")
        assert compiled_again(), name
        assert not compiled_again()


def test_code_of_another_compiler_is_not_taken(small_package, monkeypatch):
    before = kept_code.cache_folder("pallas_kernels.loops")
    for module, name in ((numba, "__version__"), (kept_code.llvmlite, "__version__")):
        with monkeypatch.context() as other:
            other.setattr(module, name, "0.0.1")
            kept_code._compiler.cache_clear()
            kept_code._fingerprint.cache_clear()
            assert kept_code.cache_folder("pallas_kernels.loops") != before
    kept_code._compiler.cache_clear()
    kept_code._fingerprint.cache_clear()
    assert kept_code.cache_folder("pallas_kernels.loops") == before


def test_imports_are_found_as_the_parser_finds_them():
    package = Path(ffi.__file__).parents[1]
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        named = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        expected = {name for name in named if name.split(".")[0] == "pallas_kernels"}
        assert expected <= kept_code._imports(module), module


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

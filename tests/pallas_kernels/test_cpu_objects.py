"""Loops that are compiled ahead give the bits of Numba's, in a process that has no Numba."""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from llvmlite import binding
from some_kernels import computed

from pallas_kernels import build_objects, cpu_features, cpu_objects, custom_calls

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from pathlib import Path
from llvmlite import binding
from pallas_kernels.build_objects import build
from pallas_kernels.cpu_objects import PROCESSORS
from some_kernels import CALLS

features = tuple(name for name, is_here in binding.get_host_cpu_features().items() if is_here)
here = PROCESSORS[sys.argv[2]]._replace(cpu=binding.get_host_cpu_name(), features=features)
build(Path(sys.argv[1]), sys.argv[2], here, CALLS)
"""
BUILD_AMX = """
import sys
from pathlib import Path
from pallas_kernels.build_objects import PROCESSORS, TileVariant, build

bytes_ = TileVariant("amx", True, True, False, False, 128, False)
calls = [("bfloat16_matmul.cpu_kernel:target", ("amx",)), ("tiled_matmul.cpu_kernel:target", (bytes_,))]
build(Path(sys.argv[1]), "x86-64-amx", PROCESSORS["x86-64-amx"], calls)
"""
COMPUTE = """
import sys

sys.modules["numba"] = sys.modules["llvmlite"] = None  # an import of them fails
import numpy as np
from some_kernels import computed

np.savez(sys.argv[1], *computed())
"""
ANSWER = """
import sys

sys.modules["numba"] = sys.modules["llvmlite"] = None
from jpaged import LLM, SamplingParams

llm = LLM("smollm2-135m", dtype=sys.argv[1], max_model_len=64, max_num_seqs=1)
(answer,) = llm.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0))
assert "Paris" in answer.outputs[0].text, answer
"""


def run(code: str, *arguments: str, **variables: str) -> None:
    """Run code in another process, which finds this folder's helpers."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    options = {"env": environment, "cwd": Path(__file__).parent, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code, *arguments], **options)
    assert done.returncode == 0, done.stderr[-3000:]


def processor() -> str:
    """Return the name of the best library for this machine."""
    return next((name for name in cpu_objects.PROCESSORS if cpu_objects.runs_here(name)), "")


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """A folder with a library of some loops, compiled for just this machine."""
    if not processor():
        pytest.skip("no library is for this machine")
    folder = tmp_path_factory.mktemp("objects")
    host = {
        "NUMBA_CPU_NAME": binding.get_host_cpu_name(),
        "NUMBA_CPU_FEATURES": binding.get_host_cpu_features().flatten(),
        cpu_objects.VARIABLE: "none",
    }
    run(BUILD, str(folder), processor(), **host)
    return folder


def test_loops_compiled_ahead_have_the_bits_of_numbas_and_need_no_numba(objects, tmp_path):
    run(COMPUTE, str(tmp_path / "found.npz"), **{cpu_objects.VARIABLE: str(objects)})
    found = np.load(tmp_path / "found.npz")
    for array, expected in zip(found.values(), computed(), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_a_library_of_other_sources_is_not_used(objects, tmp_path, monkeypatch, caplog):
    for file in objects.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv(cpu_objects.VARIABLE, str(tmp_path))
    assert cpu_objects.loaded.__wrapped__() is not None
    listed = json.loads((tmp_path / f"{processor()}.json").read_text())
    (tmp_path / f"{processor()}.json").write_text(json.dumps(listed | {"sources": "of yesterday"}))
    assert cpu_objects.loaded.__wrapped__() is None
    assert "of other sources" in caplog.text


def test_a_library_that_the_processor_cannot_run_is_not_used(objects, monkeypatch):
    monkeypatch.setenv(cpu_objects.VARIABLE, str(objects))
    monkeypatch.setattr(cpu_objects, "flags_here", lambda: frozenset({"sse2"}))
    assert cpu_objects.loaded.__wrapped__() is None


def test_a_variable_that_names_no_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(cpu_objects.VARIABLE, str(tmp_path / "away"))
    with pytest.raises(ValueError, match="is no folder; it may be 'none', too"):
        cpu_objects.loaded.__wrapped__()


def test_every_function_that_registers_calls_is_compiled_ahead():
    there = set()
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "pallas_kernels").with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "ffi.known_again" in map(ast.unparse, node.decorator_list):
                there.add(f"{module}:{node.name}")
    compiled = {function for function, _ in build_objects.all_calls()}
    if not {"vnni512", "vnni256"}.intersection(cpu_features.kinds_here()):
        there -= {f"screened_argmax.cpu_kernel:{name}_target" for name in ("screen", "exact")}
    assert there and compiled == there


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64's")
def test_loops_for_amx_are_compiled_where_there_is_none(tmp_path):
    amx = cpu_objects.PROCESSORS["x86-64-amx"]
    wanted = {
        "NUMBA_CPU_NAME": amx.cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in amx.features),
        cpu_objects.VARIABLE: "none",
    }
    run(BUILD_AMX, str(tmp_path / "objects"), **wanted)
    assert (tmp_path / "objects" / "x86-64-amx.so").exists()


def test_a_call_that_needs_amx_is_refused_without_the_permission(monkeypatch):
    monkeypatch.setattr(cpu_features, "has_amx", lambda: False)
    monkeypatch.setattr(cpu_objects, "registered", lambda key: "of a library")
    bytes_ = build_objects.TileVariant("amx", True, True, False, False, 128, False)
    for module, kind in (("bfloat16_matmul", "amx"), ("tiled_matmul", bytes_)):
        with pytest.raises(ValueError, match="a processor with AMX that Linux lets this process use"):
            custom_calls.register_again([(f"pallas_kernels.{module}.cpu_kernel", "target", (kind,))])


@pytest.mark.nightly
def test_an_engine_answers_without_numba(tmp_path):
    if not processor():
        pytest.skip("no library is for this machine")
    build_objects.compile_in_process(tmp_path, processor())
    for dtype in ("auto", "float32", "bfloat16"):
        run(ANSWER, dtype, **{cpu_objects.VARIABLE: str(tmp_path)})

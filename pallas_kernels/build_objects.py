"""Compiles the loops of CPUs ahead, into libraries that `pallas_kernels.cpu_objects` loads without Numba.

``python -m pallas_kernels.build_objects FOLDER [PROCESSOR ...]`` needs Numba and a C compiler, which links. The loops
are the same Python: Numba writes LLVM's code for a processor, which need not be this machine's, and LLVM makes an
object of it. Of Numba's own run time nothing is left. A loop raises no exceptions and owns no arrays, so its C
function, which would tell Python of an error, is replaced by one that only calls the loop. The build fails if a library
needs more than `OUTSIDE`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import import_module
from inspect import unwrap
from itertools import product
from pathlib import Path
from typing import Any

from pallas_kernels.cpu_features import best_kind, has, kind_for
from pallas_kernels.cpu_objects import FORMAT, PACKAGE, PROCESSORS, VARIABLE, call_key, digest
from pallas_kernels.tiled_matmul.variant import TileVariant

OUTSIDE = frozenset(
    {"free", "malloc", "madvise", "memcpy", "memmove", "memset", "sqrtf", "logf", "log", "expf", "floorf"}
)
"""Functions of the C library that loops may call."""
DTYPES = ("float32", "bfloat16", "uint16", "int8", "uint8")
"""Views that attention reads."""

_FREED = "NRT_MemInfo_call_dtor"
"""The function of Numba's run time that frees an array."""

Call = tuple[str, tuple[Any, ...]]
"""A function, ``module:function``, and its arguments, see `pallas_kernels.custom_calls.target`."""


def all_calls() -> Iterator[Call]:
    """Yield every call that kernels ask for on the processor that is compiled for."""
    plain = {
        "row_ops.cpu_kernel": ("norm_target", "add_norm_target", "totals_target"),
        "rotated_heads.cpu_kernel": ("target", "normed_target"),
        "kv_write.cpu_kernel": ("target",),
        "zero_pages.cpu_kernel": ("zeros_target", "zero_pages_target"),
        "thread_pool.cpu_kernel": ("thread_pool_target",),
        "matmul.cpu_kernel": ("matrices_target", "table_target", "panels_target", "grouped_target"),
        "bfloat16_matmul.cpu_float32": ("float32_target", "float32_grouped_target"),
        **{f"recurrent.cpu_{kind}": ("targets",) for kind in ("conv", "scan", "ssd", "delta")},
    }
    if best_kind() in ("vnni512", "vnni256"):
        plain["screened_argmax.cpu_kernel"] = ("screen_target", "exact_target")
    for module, functions in plain.items():
        yield from ((f"{module}:{function}", ()) for function in functions)
    yield from (("row_ops.cpu_kernel:gate_target", (activation,)) for activation in ("silu", "gelu_tanh"))
    yield from (("paged_attention.cpu_call:target", (dtype,)) for dtype in DTYPES)
    for kind in _pair_kinds():
        yield from ((f"bfloat16_matmul.cpu_kernel:{name}", (kind,)) for name in ("target", "grouped_target"))
    yield from (("tiled_matmul.cpu_kernel:target", (variant,)) for variant in _variants())


def _pair_kinds() -> list[str]:
    """Return the kinds of products of bfloat16 that a processor may want: Linux may refuse it AMX."""
    kinds = {"amx": has("amx-tile", "amx-bf16"), "avx512bf16": has("avx512bf16"), "neon": has("bf16", "neon")}
    return [kind for kind, is_here in kinds.items() if is_here] or ["widened"]


def _variants() -> Iterator[TileVariant]:
    """Yield the variants of tiled matrices, see `tiled_matmul`: codes of 8 bits and of 4, groups of any length."""
    for half in (False, True):
        for grouped, shared, minimums in ((True, True, False), (True, False, False), (True, False, True)):
            yield TileVariant(best_kind(), grouped, shared, False, minimums, 128, half)
        yield from (TileVariant(best_kind(), False, False, False, minimums, 128, half) for minimums in (False, True))
        kinds = dict.fromkeys(kind_for(best_kind(), group, packed=True) for group in (32, 64))
        for kind, grouped, minimums in product(kinds, (True, False), (False, True)):
            yield TileVariant(kind, grouped, False, True, minimums, 0, half)


def build(folder: Path, name: str, cpu: str, features: Iterable[str], calls: Iterable[Call] | None = None) -> None:
    """Compile calls for a processor in a process that Numba was made to compile for it in, see `compile_in_process`.

    Args:
        folder: gets NAME.so and NAME.json.
        features: LLVM's names, which the loops were written for.
        calls: None = `all_calls`.

    Raises:
        ValueError: a loop needs something of Numba or Python when it runs.
        subprocess.CalledProcessError: the linker failed.
    """
    from pallas_kernels.ffi import closure, compiled

    named: dict[str, Any] = {}
    for function, arguments in all_calls() if calls is None else calls:
        module, _, what = function.partition(":")
        named[call_key(f"{PACKAGE}.{module}", what, arguments)] = _compiled_here(f"{PACKAGE}.{module}", what, arguments)
    symbols: dict[int, tuple[Any, list[str]]] = {}
    for symbol, loops in compiled().items():
        symbols.setdefault(id(loops), (loops, []))[1].append(symbol)
    machine = _machine(cpu, features)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as objects:
        paths = []
        for number, (loops, own) in enumerate(symbols.values()):
            paths.append(Path(objects, f"{number}.o"))
            paths[-1].write_bytes(machine.emit_object(freed_of_python(loops, own)))
        library = folder / f"{name}.so"
        linker = [os.environ.get("CC", "cc"), "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-s", "-o"]
        subprocess.run([*linker, str(library), *map(str, paths), "-lm"], check=True)
    modules = sorted(closure({key.partition(":")[0] for key in named}))
    listed = {
        "format": FORMAT,
        "processor": {"cpu": cpu, "machine": platform.machine()},
        "features": sorted(features),
        "modules": modules,
        "sources": digest(modules),
        "calls": named,
    }
    (folder / f"{name}.json").write_text(json.dumps(listed, indent=1) + "\n")


def _compiled_here(module: str, function: str, arguments: tuple[Any, ...]) -> Any:
    """Return what a function of a module registers, whether or not this machine could run it."""
    return unwrap(getattr(import_module(module), function))(*arguments)


def _machine(cpu: str, features: Iterable[str]) -> Any:
    from llvmlite import binding

    given = os.environ.get("NUMBA_CPU_FEATURES") or ",".join(f"+{name}" for name in sorted(features))
    options = {"cpu": cpu, "features": given, "opt": 3, "reloc": "pic", "codemodel": "default"}
    return binding.Target.from_default_triple().create_target_machine(**options)


def freed_of_python(loops: Any, symbols: list[str]) -> Any:
    """Return the LLVM module of compiled loops, with a C function under each symbol and nothing else in sight."""
    from llvmlite import binding

    text, wrapper = loops.inspect_llvm(), loops.native_name
    native = wrapper.removeprefix("cfunc.")
    shape = re.search(rf'^define (\S.*?)? ?@"?{re.escape(wrapper)}"?\(([^)]*)\)', text, re.MULTILINE)
    if shape is None:
        raise ValueError(f"{wrapper} has no C function")
    words = len(shape[2].split(",")) if shape[2].strip() else 0
    returns = "i64" if re.search(r"\bi64$", shape[1].strip()) else "void"
    arguments = ", ".join(f"i64 %a{n}" for n in range(words))
    for symbol in symbols:
        text += f"""
define {returns} @"{symbol}"({arguments}) {{
  %found = alloca i64
  %error = alloca ptr
  %status = call i32 @"{native}"(ptr %found, ptr %error{"".join(f", i64 %a{n}" for n in range(words))})
  {"%value = load i64, ptr %found" if returns == "i64" else ""}
  ret {returns} {"%value" if returns == "i64" else ""}
}}
"""
    module = binding.parse_assembly(text)
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name not in symbols:
            value.linkage = "internal"
    # An array that a loop reads owns no memory, so that nothing is freed, but LLVM cannot know it.
    if _FREED in {function.name for function in module.functions}:
        trap = f"declare void @llvm.trap()\ndefine void @{_FREED}(ptr %a) {{ call void @llvm.trap() unreachable }}"
        module.link_in(binding.parse_assembly(trap))
        module.get_function(_FREED).linkage = "internal"
    options = binding.create_pipeline_tuning_options(speed_level=0)
    builder = binding.create_pass_builder(binding.Target.from_default_triple().create_target_machine(), options)
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)
    module.verify()
    needed = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")}
    more = needed - OUTSIDE - _known_symbols()
    if more:
        raise ValueError(f"loops of {native} need {', '.join(sorted(more))} when they run: they would need Numba")
    return module


def _known_symbols() -> set[str]:
    from pallas_kernels.ffi import compiled

    return set(compiled())


def compile_in_process(folder: Path, name: str) -> None:
    """Compile all calls for one of `PROCESSORS` in a fresh process, in which Numba compiles for it.

    Raises:
        subprocess.CalledProcessError: it failed; what it wrote is on the standard error stream.
    """
    processor = PROCESSORS[name]
    with tempfile.TemporaryDirectory() as nothing_kept:
        environment = os.environ | {
            VARIABLE: "none",
            "JAX_PLATFORMS": "cpu",
            "NUMBA_CACHE_DIR": nothing_kept,
            "NUMBA_CPU_NAME": processor.cpu,
            "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in processor.features),
        }
        module = "pallas_kernels.build_objects"  # run as a command, this one is called __main__
        subprocess.run([sys.executable, "-m", module, str(folder), "--here", name], env=environment, check=True)


def main(arguments: list[str]) -> None:
    """Build what the command line names."""
    if len(arguments) == 3 and arguments[1] == "--here":
        folder, _, name = arguments
        build(Path(folder), name, PROCESSORS[name].cpu, PROCESSORS[name].features)
        return
    here = [name for name, processor in PROCESSORS.items() if processor.machine == platform.machine()]
    names = arguments[1:] or here
    unknown = set(names) - set(here)
    if not arguments or unknown:
        found = f"; {', '.join(sorted(unknown))} is none of these" if unknown else ""
        raise SystemExit(f"usage: python -m pallas_kernels.build_objects FOLDER [{'|'.join(here)} ...]{found}")
    for name in names:
        compile_in_process(Path(arguments[0]), name)
        print(Path(arguments[0], f"{name}.so"))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Compiles the loops of CPUs ahead, into libraries that `pallas_kernels.cpu_objects` loads without Numba.

``python -m pallas_kernels.build_objects FOLDER [PROCESSOR ...]`` needs Numba and a C compiler, which links. The loops
are the same Python: Numba translates them to LLVM's language, and LLVM makes objects (`pallas_kernels.ffi.loops`) for a
processor, which need not be this machine's. For another architecture ``CC`` names a compiler that links for it.
"""

from __future__ import annotations

import argparse
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

from pallas_kernels.cpu_features import best_kind, has, kind_for, kind_in_registers
from pallas_kernels.cpu_objects import FORMAT, PROCESSORS, VARIABLE, Processor, all_of, call_key, runs_here
from pallas_kernels.quantised import E2M1_FLOATS, E2M1_PAIRS, FLOAT8, FP4_PAIRS, INT8, IQ4_PAIRS, NF4_PAIRS, UINT4_PAIRS
from pallas_kernels.sources import PACKAGE, closure, digest
from pallas_kernels.tiled_matmul.variant import ExactVariant, TileVariant

DTYPES = ("float32", "bfloat16", "uint16", "int8", "uint8")
"""Views that attention reads."""

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
    if kind_in_registers(best_kind()) in ("vnni512", "vnni256"):
        plain["screened_argmax.cpu_kernel"] = ("screen_target", "exact_target")
    for module, functions in plain.items():
        yield from ((f"{module}:{function}", ()) for function in functions)
    yield from (("row_ops.cpu_kernel:gate_target", (activation,)) for activation in ("silu", "gelu_tanh"))
    yield from (("paged_attention.cpu_call:target", (dtype,)) for dtype in DTYPES)
    for kind in _pair_kinds():
        yield from ((f"bfloat16_matmul.cpu_kernel:{name}", (kind,)) for name in ("target", "grouped_target"))
    for module, variants in (("cpu_kernel", _variants()), ("cpu_exact", _exact_variants())):
        for variant in variants:
            yield from ((f"tiled_matmul.{module}:{name}", (variant,)) for name in ("target", "grouped_target"))


def _pair_kinds() -> list[str]:
    """Return the kinds of products of bfloat16 that a processor may want: Linux may refuse it AMX."""
    kinds = {"amx": has("amx-tile", "amx-bf16"), "avx512bf16": has("avx512bf16"), "neon": has("bf16", "neon")}
    return [kind for kind, is_here in kinds.items() if is_here] or ["widened"]


def _variants() -> Iterator[TileVariant]:
    """Yield the variants of tiled matrices, see `tiled_matmul`: codes of 8 bits and of 4, groups of any length."""
    best = kind_in_registers(best_kind())
    for half in (False, True):
        for kind in ("amx", best) if has("amx-tile", "amx-int8") else (best,):
            for shared, minimums in ((True, False), (False, False), (False, True)):
                yield TileVariant(kind, True, shared, False, minimums, 128, half)
        yield from (TileVariant(best, False, False, False, minimums, 128, half) for minimums in (False, True))
        kinds = dict.fromkeys(kind_for(best, group, packed=True) for group in (32, 64))
        for kind, grouped, minimums in product(kinds, (True, False), (False, True)):
            yield TileVariant(kind, grouped, False, True, minimums, 0, half)


def _exact_variants() -> Iterator[ExactVariant]:
    """Yield the variants of tiled matrices whose rows are not rounded: each codec with the scales that formats have."""
    for scale in ("float32", "float16"):
        yield from (ExactVariant(INT8.name, scale, minimums) for minimums in (False, True))
        yield from (ExactVariant(codec.name, scale, codec == UINT4_PAIRS) for codec in (UINT4_PAIRS, IQ4_PAIRS))
    yield from (ExactVariant(codec.name, "float32", False) for codec in (FLOAT8, E2M1_FLOATS, NF4_PAIRS, FP4_PAIRS))
    yield ExactVariant(E2M1_PAIRS.name, "uint8", False)


def build(folder: Path, name: str, processor: Processor, calls: Iterable[Call] | None = None) -> None:
    """Compile calls for a processor, in a process whose loops are written for it, see `compile_in_process`.

    Args:
        folder: gets NAME.so and NAME.json.
        calls: None = `all_calls`.

    Raises:
        ValueError: a loop needs something of Numba or Python when it runs.
        subprocess.CalledProcessError: the linker failed.
    """
    from pallas_kernels.ffi import code_of

    named: dict[str, Any] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as objects:
        paths = []
        for number, (function, arguments) in enumerate(all_calls() if calls is None else calls):
            module, _, what = function.partition(":")
            module = f"{PACKAGE}.{module}"
            # The function itself, as what decorates it would also load the code here.
            names = unwrap(getattr(import_module(module), what))(*arguments)
            named[call_key(module, what, arguments)] = names
            paths.append(Path(objects, f"{number}.o"))
            paths[-1].write_bytes(code_of(all_of(names), machine_for(processor)))
        library = folder / f"{name}.so"
        linker = [os.environ.get("CC", "cc"), "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-s", "-o"]
        subprocess.run([*linker, str(library), *map(str, paths), "-lm"], check=True)
    modules = sorted(closure({key.partition(":")[0] for key in named}))
    listed = {
        "format": FORMAT,
        "processor": {"cpu": processor.cpu, "machine": processor.machine},
        "features": sorted(processor.features),
        "modules": modules,
        "sources": digest(modules),
        "glibc": _glibc_of(library.read_bytes()),
        "calls": named,
    }
    (folder / f"{name}.json").write_text(json.dumps(listed, indent=1) + "\n")


def machine_for(processor: Processor) -> Any:
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    triple = f"{processor.machine}-unknown-linux-gnu"
    features = ",".join(f"+{name}" for name in processor.features)
    options = {"cpu": processor.cpu, "features": features, "opt": 3, "reloc": "pic", "codemodel": "default"}
    return binding.Target.from_triple(triple).create_target_machine(**options)


def _glibc_of(library: bytes) -> str:
    """Return the oldest version of glibc that has all that a library needs of it."""
    found = {tuple(map(int, version.split(b"."))) for version in re.findall(rb"GLIBC_(\d+\.\d+)", library)}
    return ".".join(map(str, max(found, default=(2, 17))))


def compile_in_process(folder: Path, name: str, *texts: str) -> None:
    """Compile for one of `PROCESSORS` in a fresh process, whose loops are written for it.

    Args:
        texts: each call that is compiled has one of them in its function or arguments; without any, all are compiled.

    Raises:
        subprocess.CalledProcessError: it failed; what it wrote is on the standard error stream.
    """
    processor = PROCESSORS[name]
    environment = os.environ | {
        VARIABLE: "none",
        "JAX_PLATFORMS": "cpu",
        "NUMBA_CPU_NAME": processor.cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in processor.features),
    }
    module = "pallas_kernels.build_objects"  # run as a command, this one is called __main__
    code = f"import sys; from {module} import build_here; build_here(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, str(folder), name, *texts], env=environment, check=True)


def build_here(folder: str, name: str, *texts: str) -> None:
    """See `compile_in_process`; this process' loops are written for the processor."""
    chosen = [call for call in all_calls() if not texts or any(text in f"{call[0]}{call[1]}" for text in texts)]
    build(Path(folder), name, PROCESSORS[name], chosen)


def main(arguments: list[str]) -> None:
    """Build what the command line names."""
    own = [name for name, processor in PROCESSORS.items() if processor.machine == platform.machine()]
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.build_objects", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets NAME.so and NAME.json of each processor")
    parser.add_argument(
        "processors",
        nargs="*",
        metavar="PROCESSOR",
        choices=[*PROCESSORS, "here", []],
        help=f"one of {', '.join(PROCESSORS)}, or 'here', the best that this machine is; default: {' '.join(own)}",
    )
    parser.add_argument("--calls", nargs="+", default=[], metavar="TEXT", help="only calls that have one of the texts")
    given = parser.parse_args(arguments)
    for name in given.processors or own:
        if name == "here" and not (name := next(filter(runs_here, PROCESSORS), "")):
            raise SystemExit(f"this machine is none of {', '.join(PROCESSORS)}")
        compile_in_process(given.folder, name, *given.calls)
        print(given.folder / f"{name}.so")


if __name__ == "__main__":
    main(sys.argv[1:])

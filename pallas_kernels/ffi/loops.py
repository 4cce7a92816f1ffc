"""Compiles loops to machine code that needs nothing of Numba when it runs.

Numba by itself optimises each function alone, makes machine code of it and of wrappers for Python, copies it into its
callers, where it is optimised again, and links all that in memory. A loop here calls functions in four levels, and
Python calls none of them. So Numba only translates functions to LLVM's language (`njit`, `cfunc`). What the C functions
of one call need is then put together (`code_of`), optimised once, as a whole, and made an object, for this processor or
another one.

A loop raises no exceptions and owns no arrays. Numba's C function, which would tell Python of an error, is replaced by
one that only calls the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import numba
from llvmlite import binding
from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.llvm_bindings import create_pass_builder
from numba.core.registry import cpu_target

OUTSIDE = frozenset(
    {"free", "malloc", "madvise", "memcpy", "memmove", "memset", "sqrtf", "logf", "log", "expf", "floorf"}
)
"""Functions of the C library that loops may call."""

_FREED = "NRT_MemInfo_call_dtor"
"""The function of Numba's run time that frees an array."""

njit = partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Translate a function that loops call, as `numba.njit` does. Python cannot call it; its attribute ``py_func`` is the
Python function."""


def with_names(function: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function that sees these global names besides its module's, to compile it for one variant of a loop."""
    return FunctionType(function.__code__, function.__globals__ | dict(names), function.__name__)


class Loop:
    """A function that C calls with words of 8 bytes and that returns one, or nothing; translated at its first use, so
    that a model costs only the loops that it calls."""

    def __init__(self, signature: Any, function: Callable[..., None], **options: Any):
        self._signature, self._function, self._options = signature, function, options

    @cached_property
    def _compiled(self) -> Any:
        with _translating():
            (compiled,) = njit(self._signature, **self._options)(self._function).overloads.values()
        return compiled

    def module(self) -> Any:
        """Return LLVM's module of the function and all that it calls, which is not optimised."""
        return self._compiled.library._final_module.clone()

    def declaration(self) -> str:
        """Return what the text of `c_function` refers to."""
        words = ", i64" * len(self._compiled.signature.args)
        return f'declare i32 @"{self._compiled.fndesc.llvm_func_name}"(ptr, ptr{words})\n'

    def c_function(self, symbol: str, bound: tuple[int | str, ...]) -> str:
        """Return the text of a C function of this name that calls the function, whose status is always success.

        Args:
            bound: the function's last arguments: numbers, and symbols of which it gets the addresses.
        """
        words = [f"i64 %a{n}" for n in range(len(self._compiled.signature.args) - len(bound))]
        numbers = [word if isinstance(word, int) else f'ptrtoint (ptr @"{word}" to i64)' for word in bound]
        given = ", ".join(["ptr %found", "ptr %error", *words, *(f"i64 {number}" for number in numbers)])
        has_result = self._compiled.signature.return_type != types.none
        return f"""
define {"i64" if has_result else "void"} @"{symbol}"({", ".join(words)}) {{
  %found = alloca i64
  %error = alloca ptr
  %status = call i32 @"{self._compiled.fndesc.llvm_func_name}"({given})
  {"%value = load i64, ptr %found" if has_result else ""}
  ret {"i64 %value" if has_result else "void"}
}}
"""


def cfunc(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Loop]:
    """Make a `Loop` of a function, with the options of `numba.njit`."""
    return lambda function: Loop(signature, function, **options)


_symbols: dict[str, tuple[Loop, tuple[int | str, ...]]] = {}


def add_symbol(name: str, loop: Loop, *bound: int | str) -> None:
    """Give a loop the name by which other loops find it, see `pallas_kernels.ffi.primitives.address_of`, or XLA; once.

    Args:
        bound: its last arguments, which callers do not give: numbers, and names of which it gets the addresses.
    """
    _symbols.setdefault(name, (loop, bound))


def code_of(names: Iterable[str], machine: Any = None) -> bytes:
    """Return an object with the C functions of these symbols, and of nothing else that others see.

    Args:
        machine: llvmlite's target machine to compile for; None = this processor, or the one that Numba is set to.

    Raises:
        ValueError: a loop needs something of Numba or Python when it runs.
    """
    names = list(names)
    if machine is None:
        machine = cpu_target.target_context.codegen()._tm
    module = _linked(names)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name not in names:
            value.linkage = "internal"
    _optimise(module, machine)
    module.verify()
    needed = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")}
    if more := needed - OUTSIDE:
        raise ValueError(f"loops of {', '.join(names)} need {', '.join(sorted(more))} when they run: they need Numba")
    return machine.emit_object(module)


def _linked(names: Iterable[str]) -> Any:
    """Return one module of the C functions of some symbols and all that they need."""
    module, left, text = binding.parse_assembly(""), list(names), {}
    linked: list[Loop] = []
    while left:
        if (symbol := left.pop()) in text:
            continue
        loop, bound = _symbols[symbol]
        text[symbol] = loop.c_function(symbol, bound)
        left += [word for word in bound if isinstance(word, str)]
        if loop not in linked:
            linked.append(loop)
            part = loop.module()
            left += [function.name for function in part.functions if function.name in _symbols]
            module.link_in(part)
    module.link_in(binding.parse_assembly("".join(loop.declaration() for loop in linked) + "".join(text.values())))
    # An array that a loop reads owns no memory, so that nothing is freed, but LLVM cannot know it.
    if _FREED in {function.name for function in module.functions}:
        trap = f"declare void @llvm.trap()\ndefine void @{_FREED}(ptr %a) {{ call void @llvm.trap() unreachable }}"
        module.link_in(binding.parse_assembly(trap))
    return module


def _optimise(module: Any, machine: Any) -> None:
    """Optimise a module as Numba does: references of arrays go first, which keep loops from being vectorised."""
    builder = create_pass_builder(machine, opt=0)
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)
    passes = builder.getModulePassManager()
    for add_pass in (passes.add_loop_rotate_pass, passes.add_instruction_combine_pass, passes.add_jump_threading_pass):
        add_pass()
    passes.add_refprune_pass()
    passes.run(module, builder)
    builder = create_pass_builder(machine, opt=3, loop_vectorize=True)
    passes = builder.getModulePassManager()
    passes.add_refprune_pass()
    passes.run(module, builder)


class _Translated(JITCodeLibrary):
    """Holds the code of a function that is not optimised, and of which no machine code is made."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


@contextmanager
def _translating() -> Iterator[None]:
    """Let Numba only translate what it compiles; other threads wait."""
    codegen = cpu_target.target_context.codegen()
    set_env = codegen.set_env

    def create_library(of: str, **options: Any) -> JITCodeLibrary:
        return _Translated(codegen, of, **options)

    def set_env_of_whole(of: str, env: Any) -> None:
        if codegen._engine.is_symbol_defined(of):  # what is translated has no memory for what Python's errors need
            set_env(of, env)

    with global_compiler_lock:
        codegen.create_library, codegen.set_env = create_library, set_env_of_whole
        try:
            yield
        finally:
            del codegen.create_library, codegen.set_env

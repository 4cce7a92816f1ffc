"""Compiles the functions that a loop calls as parts of the loop, in half of the time that Numba takes for them.

Numba optimises each function by itself, makes machine code of it and of a wrapper for Python, and then copies it into
its callers, where it is optimised again. A loop here calls functions in four levels, and Python calls none of them. So
they get no wrapper, and what is copied into the loop is what they were translated to: the loop is optimised once, as a
whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

njit = partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Compile a function that loops call, as `numba.njit` does. Python cannot call it; its attribute ``py_func`` is the
Python function."""


class _Part(JITCodeLibrary):
    """Holds the code of a function that is copied into a loop: it is not optimised, and no machine code is made."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


@contextmanager
def as_parts_of(name: str) -> Iterator[None]:
    """Let everything that is compiled for the function of this qualified name be a part of it; other threads wait."""
    codegen = cpu_target.target_context.codegen()
    set_env = codegen.set_env

    def create_library(of: str, **options: Any) -> JITCodeLibrary:
        return (JITCodeLibrary if of == name else _Part)(codegen, of, **options)

    def set_env_of_whole(of: str, env: Any) -> None:
        if codegen._engine.is_symbol_defined(of):  # parts have no memory for what only Python's errors need
            set_env(of, env)

    with global_compiler_lock:
        codegen.create_library, codegen.set_env = create_library, set_env_of_whole
        try:
            yield
        finally:
            del codegen.create_library, codegen.set_env

"""Compiles the shapes of a jitted function one by one, and knows them by name.

Compiling ahead of the first call runs nothing, so a warm-up costs no step, needs no pool, and hands the compiler to
a second thread while the next shape is traced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax

from jpaged.execution.program_store import ProgramStore, program_name
from jpaged.execution.recent_programs import CompiledProgram, recent_programs, signature


def _nobody_waits(key: Hashable, seconds: float) -> None:
    """Do nothing: nobody wants to know when a compilation ends."""


class Program:
    """Compiles a function once for each key.

    Args:
        function: jitted; static arguments are given by name.
        on_compile: told each key that was not compiled before, when its tracing begins.
        on_compiled: told the key and the seconds of tracing and compiling when that has ended, or has failed.
        made_of: everything that `function` was made of, if it can be compared: then programs that this process compiled
            for an equal function are taken from `recent_programs`. They are told of as if they had been compiled.
        kind: which of its engine's functions it is, unique there; "" = one that is not kept in `store`.
        store: where programs are loaded from, or collected for; None = neither.

    Attributes:
        out_info: shapes of what the function gives back, as last traced.
    """

    out_info: Any

    def __init__(
        self,
        function: jax.stages.Wrapped,
        on_compile: Callable[[Hashable], None],
        on_compiled: Callable[[Hashable, float], None] = _nobody_waits,
        made_of: Hashable | None = None,
        *,
        kind: str = "",
        store: ProgramStore | None = None,
    ) -> None:
        self._function = function
        self._on_compile = on_compile
        self._on_compiled = on_compiled
        self._made_of = made_of
        self._kind = kind
        self._store = store if kind else None
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def __call__(self, key: Hashable, *args: Any, **static: Any) -> Any:
        """Call the function; all calls with one key have the same shapes and static arguments."""
        compiled = self._compiled.get(key)
        if compiled is None:
            self.prepare(key, *args, **static)()
            compiled = self._compiled[key]
        return compiled(*args)

    def prepare(self, key: Hashable, *args: Any, **static: Any) -> Callable[[], None]:
        """Trace the function for `args`, arrays or their shapes; what is returned compiles it, in any thread."""
        self._on_compile(key)
        start = time.perf_counter()
        name = None if self._made_of is None else signature(self._made_of, args, static)
        stored = "" if self._store is None else program_name(self._kind, key, args, static)
        if (known := self._known(name, stored, args)) is not None:
            self._compiled[key], self.out_info = known
            return lambda: self._on_compiled(key, time.perf_counter() - start)
        try:
            lowered = self._function.lower(*args, **static)
        except BaseException:
            self._on_compiled(key, time.perf_counter() - start)
            raise
        tracing = time.perf_counter() - start
        self.out_info = lowered.out_info
        # A trace takes megabytes and is not asked for again. What `jax.jit` returns has more than its type says.
        self._function.clear_cache()  # type: ignore[attr-defined]

        def compile_it() -> None:
            start = time.perf_counter()
            try:
                self._compiled[key] = executable = lowered.compile()
                program = CompiledProgram(executable, lowered.out_info)
                recent_programs.keep(name, program)
                if self._store is not None and self._store.collects:
                    self._store.keep(stored, program)
            finally:
                self._on_compiled(key, tracing + time.perf_counter() - start)

        return compile_it

    def _known(self, name: Hashable | None, stored: str, args: tuple[Any, ...]) -> CompiledProgram | None:
        """Return the program if there is no need to compile it."""
        if self._store is not None and self._store.collects:
            return None  # only what the compiler gives can be written
        known = recent_programs.find(name)
        if known is None and self._store is not None and (known := self._store.find(stored, args)) is not None:
            recent_programs.keep(name, known)
        return known

    def forget(self) -> None:
        """Let go of everything that was compiled; what is called again is compiled again."""
        self._compiled.clear()

"""A jitted function whose shapes are compiled one by one and known by name.

Compiling ahead of the first call runs nothing, so a warm-up costs no step, needs no pool, and hands the compiler to
a second thread while the next shape is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax


class Program:
    """A function compiled once a key.

    Args:
        function: jitted; static arguments are given by name.
        on_compile: told each key that was not compiled before.

    Attributes:
        out_info: shapes of what the function gives back, as last traced.
    """

    out_info: Any

    def __init__(self, function: jax.stages.Wrapped, on_compile: Callable[[Hashable], None]) -> None:
        self._function = function
        self._on_compile = on_compile
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
        lowered = self._function.lower(*args, **static)
        self.out_info = lowered.out_info

        def compile_it() -> None:
            self._compiled[key] = lowered.compile()

        return compile_it

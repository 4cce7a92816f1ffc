"""Keeps the programs that this process compiled last, so that a second engine like the first compiles nothing.

Tracing takes about a second a shape whatever the cache on disk holds, and people make an engine again and again: in a
notebook, after a change of a setting, in tests.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

MOST_PROGRAMS = 64
"""Programs that are kept. One takes a few megabytes of host memory, and none of the device's pool or weights."""


class CompiledProgram(NamedTuple):
    """A compiled program and the shapes of its results."""

    executable: jax.stages.Compiled
    out_info: Any


class RecentPrograms:
    """Finds compiled programs by all that they depend on. Safe in threads.

    Args:
        most: programs kept; the least recently requested one is dropped first.
    """

    def __init__(self, most: int = MOST_PROGRAMS) -> None:
        self._most = most
        self._programs: OrderedDict[Hashable, CompiledProgram] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, signature: Hashable | None) -> CompiledProgram | None:
        """Return the program of a `signature`, or None."""
        if signature is None:
            return None
        with self._lock:
            program = self._programs.get(signature)
            if program is not None:
                self._programs.move_to_end(signature)
            return program

    def keep(self, signature: Hashable | None, program: CompiledProgram) -> None:
        """Keep a program under its `signature`; without one it is not kept."""
        if signature is None:
            return
        with self._lock:
            self._programs[signature] = program
            while len(self._programs) > self._most:
                self._programs.popitem(last=False)

    def clear(self) -> None:
        """Forget all programs."""
        with self._lock:
            self._programs.clear()


recent_programs = RecentPrograms()
"""The programs of this process."""


def signature(made_of: Hashable, args: tuple[Any, ...], static: Mapping[str, Any]) -> Hashable | None:
    """Return all that the compiled form of a function depends on; None where it cannot be compared.

    Args:
        made_of: what the function was made of; two functions made of equal things are the same function.
        args: arrays or their shapes.
        static: its static arguments.
    """
    leaves, tree = jax.tree.flatten(args)
    shapes = tuple(
        (np.shape(leaf), np.dtype(getattr(leaf, "dtype", type(leaf))), getattr(leaf, "sharding", None))
        for leaf in leaves
    )
    found = made_of, tree, shapes, tuple(sorted(static.items()))
    try:
        hash(found)
    except TypeError:  # a model's module holds what has no hash, as arrays have none
        return None
    return found

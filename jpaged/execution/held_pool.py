"""Holds the pool of a worker from its making to its end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
from jax.sharding import Mesh

from jpaged.execution.caches.pool import PoolSpec, make_pool
from jpaged.execution.mesh import is_local


class HeldPool:
    """Holds the pool, donated to every program that changes it and replaced by what that gives back.

    A thread makes it, where no other process has a part in that: a CPU takes a second to map a gigabyte, and warming up
    does not need it.
    """

    def __init__(self, spec: PoolSpec, mesh: Mesh) -> None:
        thread = ThreadPoolExecutor(1)
        self._made = thread.submit(make_pool, spec, mesh)
        thread.shutdown(wait=not is_local(mesh))
        self._array: jax.Array | None = None

    @property
    def array(self) -> jax.Array:
        """Return the pool, once all calls made so far are done.

        Raises:
            Exception: whatever kept it from being made.
        """
        if self._array is None:
            self._array = self._made.result()
        return self._array

    @array.setter
    def array(self, array: jax.Array) -> None:
        self._array = array

    def delete(self) -> None:
        """Give back the memory, where there is any: the pool may not have been made, or a call may have taken it."""
        array = self._array
        if array is None and self._made.exception() is None:
            array = self._made.result()
        if array is not None and not array.is_deleted():
            array.delete()

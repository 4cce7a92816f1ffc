"""Moves what is left of a CPU's program onto the threads of XLA's pool, which share the items of its loops."""

from __future__ import annotations

import jax
from jaxtyping import Array, Shaped

from pallas_kernels.platform import Impl, resolve_impl

__all__ = ["on_thread_pool"]


def on_thread_pool(x: Shaped[Array, "*axes"], *, impl: Impl | None = None) -> Shaped[Array, "*axes"]:
    """Return `x`, given by a thread of XLA's pool; to be called within `jax.jit` of one device.

    On a CPU a program is a row of operations. It begins on the thread that dispatched it, beside the pool's threads, of
    which each processor has one: items of a loop are then shared by one thread more than there are processors, and
    where two of them take turns on one, another processor has nothing to do until the system moves one of them. From
    the call on that gives `x` the program runs on the pool's threads alone.

    Args:
        x: what the operations that matter need; small, as it is copied unless the program may overwrite it.
        impl: ``cpu`` moves, and needs Numba; all others return `x` itself. None picks by platform.
    """
    if resolve_impl(impl) != "cpu":
        return x
    from pallas_kernels.thread_pool.cpu_kernel import thread_pool_target

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(thread_pool_target(), like, input_output_aliases={0: 0})(x)

"""Moves the rest of a CPU's program onto the threads of XLA's pool, which share the items of its loops."""

from __future__ import annotations

import jax
from jaxtyping import Array, Shaped

from pallas_kernels.custom_calls import target
from pallas_kernels.platform import Impl, resolve_impl

__all__ = ["on_thread_pool"]


def on_thread_pool(x: Shaped[Array, "*axes"], *, impl: Impl | None = None) -> Shaped[Array, "*axes"]:
    """Return `x`, given by a thread of XLA's pool; to be called within `jax.jit` of one device.

    On a CPU a program is a sequence of operations. It begins on the thread that dispatched it, in addition to the
    pool's threads, one per processor. So one thread more than there are processors shares the items of a loop; while
    two of them take turns on one processor, another processor is idle until the system moves one of them. From the call
    that gives `x` on, the program runs on the pool's threads alone, unless the pool answers before the dispatching
    thread has left the call: that thread then goes on, and only speed is lost.

    Args:
        x: an operand of the operations that matter; small, as it is copied unless the program may overwrite it.
        impl: ``cpu`` moves, and needs compiled loops; all others return `x` itself. None picks by platform.
    """
    if resolve_impl(impl) != "cpu":
        return x
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    name = target("thread_pool.cpu_kernel:thread_pool_target")
    return jax.ffi.ffi_call(name, like, input_output_aliases={0: 0})(x)

"""Zeroes a pool of pages: all of them at the start, and later the pages that are no longer needed.

Both read as plain zeros. On Linux `cpu_kernel` gets them by giving the memory back to the operating system, which maps
zeros at the next touch: a page takes memory only from its first write until it is zeroed.
"""

from __future__ import annotations

import mmap
import sys

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels.custom_calls import target
from pallas_kernels.platform import Impl, resolve_impl

DONT_NEED: int | None = mmap.MADV_DONTNEED if sys.platform == "linux" else None
"""The advice after which private memory reads as zeros, as Linux promises; other systems do not."""

__all__ = ["frees_memory", "zero_pages", "zeros"]


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, *, impl: Impl | None = None) -> Shaped[Array, ...]:
    """Return an array of zeros on one device; to be called within `jax.jit`.

    Args:
        impl: ``cpu`` touches no memory and needs compiled loops; all others write it. None picks by platform.
    """
    if resolve_impl(impl) != "cpu":
        return jnp.zeros(shape, dtype)
    name = target("zero_pages.cpu_kernel:zeros_target")
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, dtype))(_item_bytes(dtype))


def zero_pages(
    pages: Shaped[Array, "*pages rows lanes"], unused: Bool[Array, " *pages"], *, impl: Impl | None = None
) -> Shaped[Array, "*pages rows lanes"]:
    """Return ``pages`` with zeros where `unused` is true; in place when `pages` is donated.

    Args:
        pages: for ``cpu`` an argument of the jitted function as it came: XLA would copy what was reshaped before.
        unused: one truth for each page; its axes are the first ones of `pages`.
        impl: see `zeros`.
    """
    if resolve_impl(impl) != "cpu":
        every_element = jnp.expand_dims(unused, range(unused.ndim, pages.ndim))
        return jnp.where(every_element, jnp.zeros((), pages.dtype), pages)
    like = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    in_place = jax.ffi.ffi_call(target("zero_pages.cpu_kernel:zero_pages_target"), like, input_output_aliases={1: 0})
    return in_place(_item_bytes(pages.dtype), pages, unused)


def _item_bytes(dtype: jnp.dtype) -> Int[Array, " 1"]:
    return jnp.asarray([jnp.dtype(dtype).itemsize], jnp.int32)


def frees_memory(impl: Impl | None = None) -> bool:
    """Tell whether `zero_pages` gives memory back, rather than writing zeros to it."""
    return resolve_impl(impl) == "cpu" and DONT_NEED is not None

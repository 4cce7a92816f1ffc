"""Sees what is brought from devices to the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax._src.array import ArrayImpl

LARGEST = 1 << 10
"""Bytes that the host may have: a step's tables are smaller, the weights of tests' models larger."""


@contextmanager
def nothing_large_on_the_host() -> Iterator[None]:
    """Fail where an array of more than `LARGEST` bytes is brought to the host, or any is put on a device.

    On a CPU JAX's guard lets pass what is brought to the host, which is no copy there; NumPy finds the memory of an
    array on one CPU device by itself, and is seen where the array comes back.
    """
    value = ArrayImpl._value

    def seen(array: ArrayImpl) -> object:
        assert array.nbytes <= LARGEST, f"{array.nbytes} bytes of a weight go through the host: {array.sharding}"
        return value.fget(array)

    ArrayImpl._value = property(seen)
    try:
        with (
            jax.transfer_guard_device_to_host("disallow_explicit"),
            jax.transfer_guard_host_to_device("disallow_explicit"),
        ):
            yield
    finally:
        ArrayImpl._value = value

"""A launcher that runs Triton kernels on the CPU, by Triton's own interpreter, on arrays of JAX.

``TRITON_INTERPRET=1`` must be set before the kernels are imported.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from pallas_kernels.gpu_launch import Launch

_cast = InterpreterBuilder.cast_impl
_dot = InterpreterBuilder.create_dot


def _cast_to_nearest(self, src, to):
    """The interpreter cuts a float32's bits off where a GPU rounds them."""
    if (src.dtype.scalar, to.scalar) == (tl.float32, tl.bfloat16):
        return TensorHandle(src.data.astype(jnp.bfloat16).view(np.uint16), tl.bfloat16)
    return _cast(self, src, to)


def _dot_of_bfloat16(self, a, b, *rest):
    """The interpreter keeps bfloat16 as uint16, and would multiply those integers."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _dot(self, a, b, *rest)


InterpreterBuilder.cast_impl = _cast_to_nearest
InterpreterBuilder.create_dot = _dot_of_bfloat16


class HostTensor:
    """A NumPy array with what the interpreter asks of a torch tensor: its memory is copied in and out at once."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> HostTensor:
        return self

    def cpu(self) -> HostTensor:
        return self

    def copy_(self, other: HostTensor) -> None:
        assert other.array is self.array

    def new_empty(self, size: int, device: str) -> HostTensor:
        return HostTensor(np.empty(size, self.array.dtype))

    def set_(self, storage: HostTensor, *_: object) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def interpret(launch: Launch, *inputs: jax.Array | int) -> list[jax.Array]:
    """`pallas_kernels.gpu_launch.Launcher` on the CPU; outputs that are not aliased start as NaN."""
    tensors = [array if isinstance(array, int) else HostTensor(np.array(array)) for array in inputs]
    outputs = {out: tensors[at] for at, out in launch.aliases.items()}
    aliased = list(outputs.values())
    for index in range(len(aliased), len(launch.out)):
        outputs[index] = HostTensor(np.full(launch.out[index].shape, np.nan, launch.out[index].dtype))
    pointers = [*tensors, *(outputs[index] for index in range(len(launch.out)))]
    launch.kernel[launch.grid](*pointers, **launch.constants)
    return [jnp.asarray(outputs[index].array) for index in range(len(launch.out))]

"""Places host arrays on the mesh: whole parameters, or one layer's slice of a stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from jpaged.loading.parameters.host_memory import ALIGNMENT
from jpaged.model_api import HostArray


def sharding_of(mesh: jax.sharding.Mesh, partition: PartitionSpec, *, stacked: bool = False) -> NamedSharding:
    """Return the sharding of a parameter, or of a stack of them: never split over layers, for the scan walks them."""
    return NamedSharding(mesh, PartitionSpec(None, *partition) if stacked else partition)


Index = tuple[slice, ...]


@dataclass(frozen=True)
class Parts:
    """Holds the parts of a host array of `shape` for this process's devices; ``parts[index]`` is cast and aligned."""

    shape: tuple[int, ...]
    parts: Mapping[tuple[tuple[int | None, int | None], ...], np.ndarray]

    def __getitem__(self, index: Index) -> np.ndarray:
        return self.parts[_bounds(index)]


def own_parts(
    array: HostArray, dtype: np.dtype, sharding: NamedSharding, empty: Callable[..., np.ndarray] = np.empty
) -> Parts:
    """Cut the parts of this process's devices out of a host array; only these parts of a file view are read.

    Parts are copies, unless their memory in `array` has the layout that a CPU device needs: then it takes that memory.

    Args:
        empty: makes the copies' memory from a shape and a dtype.

    Raises:
        OverflowError: `dtype` is float16, and the array has a number above the largest float16.
    """
    indices = sharding.addressable_devices_indices_map(array.shape).values()
    wanted = {_bounds(index): index for index in indices if index is not None}
    return Parts(array.shape, {at: _as_held(np.asarray(array[index]), dtype, empty) for at, index in wanted.items()})


def _as_held(part: np.ndarray, dtype: np.dtype, empty: Callable[..., np.ndarray]) -> np.ndarray:
    if part.dtype == dtype and part.flags.c_contiguous and part.ctypes.data % ALIGNMENT == 0:
        return part
    copy = empty(part.shape, dtype)
    with np.errstate(over="ignore"):
        np.copyto(copy, part, casting="unsafe")
    if dtype == np.float16 and part.dtype != np.float16:
        _check_range(copy, part)
    return copy


def _check_range(held: np.ndarray, given: np.ndarray) -> None:
    """Raise OverflowError where a finite number became infinite."""
    beyond = np.isinf(held)
    if beyond.any():
        wide = np.abs(given[beyond].astype(np.float32))
        if np.isfinite(wide).any():
            largest = wide[np.isfinite(wide)].max()
            raise OverflowError(f"{largest:g} is beyond {np.finfo(held.dtype).max:g}, the largest {held.dtype}")


def place(parts: Parts, sharding: NamedSharding) -> Shaped[Array, "*shape"]:
    """Put the parts of this process's devices, cut for this sharding, on these devices."""
    return jax.make_array_from_callback(parts.shape, sharding, lambda index: parts[index or ()])


def _bounds(index: Index) -> tuple[tuple[int | None, int | None], ...]:
    """Return hashable bounds of slices, which cannot be keys before Python 3.12."""
    return tuple((part.start, part.stop) for part in index)


def empty_stack(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> Shaped[Array, "layers ..."]:
    """Return a zeroed stack of parameters, each device allocating its own shard only."""
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)()


@partial(jax.jit, donate_argnums=0)
def set_layer(
    stack: Shaped[Array, "layers ..."], value: Shaped[Array, "*shape"], index: int | Int[Array, ""] | None
) -> Shaped[Array, "layers ..."]:
    """Return `stack` with layer `index` set to `value`, in place: the stack is donated."""
    return jax.lax.dynamic_update_index_in_dim(stack, value, index, 0)

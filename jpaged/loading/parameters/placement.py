"""Places parameters on the mesh one after another, while worker threads read the next few.

A CPU device takes host memory as its own if that is aligned; `HostMemory` allocates it in large pieces, as Linux gives
huge pages only to those.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Shaped

from jpaged.loading.parameters.targets import NotBfloat16, Target, Value, abstract_value, with_codes
from jpaged.loading.weight_formats.weight_format import StatePath
from jpaged.model_api import HostArray
from pallas_kernels.held_matrix import HeldMatrix, PermutedMatrix, is_held
from pallas_kernels.large_pages import PAGE_BYTES
from pallas_kernels.panelled_floats import panelled_floats
from pallas_kernels.quantised import QuantisedMatrix
from pallas_kernels.tiled import tiled
from pallas_kernels.tiled_floats import NotBfloat16Error, tiled_floats

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Parts:
    """Holds the parts of a host array of `shape` for this process's devices; ``parts[index]`` is cast and aligned."""

    shape: tuple[int, ...]
    parts: Mapping[tuple[tuple[int | None, int | None], ...], np.ndarray]

    def __getitem__(self, index: Index) -> np.ndarray:
        return self.parts[_bounds(index)]


_BYTES_AT_ONCE = 1 << 20
"""Bytes that are decoded at once of an array whose slices are not read yet, for the reason in `panelled_floats`."""
_WHOLE_BLOCKS = 256
"""Divisor of the lines of a piece: no piece ends within a block of codes, which would be decoded twice."""


def own_parts(
    array: HostArray, dtype: np.dtype, sharding: NamedSharding, empty: Callable[..., np.ndarray] = np.empty
) -> Parts:
    """Cut the parts of this process's devices out of a host array; only these parts of a file view are read.

    Parts are copies, unless their memory in `array` has the layout that a CPU device needs: then it takes that memory.
    Slices that are not read yet, as those of GGUF files, are decoded in pieces, each straight into its place.

    Args:
        empty: makes the copies' memory from a shape and a dtype.

    Raises:
        OverflowError: `dtype` is float16, and the array has a number above the largest float16.
    """
    indices = sharding.addressable_devices_indices_map(array.shape).values()
    wanted = {_bounds(index): index for index in indices if index is not None}
    return Parts(array.shape, {at: _as_held(array[index], dtype, empty) for at, index in wanted.items()})


def _as_held(part: HostArray, dtype: np.dtype, empty: Callable[..., np.ndarray]) -> np.ndarray:
    size = math.prod(part.shape) * dtype.itemsize
    if isinstance(part, np.ndarray) or size <= _BYTES_AT_ONCE:
        read = np.asarray(part)
        if read.dtype == dtype and read.flags.c_contiguous and read.ctypes.data % ALIGNMENT == 0:
            return read
        held = empty(read.shape, dtype)
        _fill(held, read)
        return held
    held = empty(part.shape, dtype)
    axis = part.shape.index(max(part.shape))
    lines = max(1, _BYTES_AT_ONCE * part.shape[axis] // size // _WHOLE_BLOCKS) * _WHOLE_BLOCKS
    at = [slice(None)] * len(part.shape)
    for start in range(0, part.shape[axis], lines):
        at[axis] = slice(start, start + lines)
        _fill(held[tuple(at)], np.asarray(part[tuple(at)]))
    return held


def _fill(held: np.ndarray, part: np.ndarray) -> None:
    """Copy a part, whose numbers may be of another dtype.

    Raises:
        OverflowError: `held` is of float16, and a number is above the largest float16.
    """
    with np.errstate(over="ignore"):
        np.copyto(held, part, casting="unsafe")
    if held.dtype == np.float16 and part.dtype != np.float16:
        _check_range(held, part)


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


_PIECE_BYTES = 64 << 20
ALIGNMENT = 64
"""Bytes: a CPU device takes memory that begins at a multiple of this as its own, without a copy."""


class HostMemory:
    """Cuts arrays out of large pieces, each of which is freed with the last of its arrays. Thread-safe.

    A first touch of memory costs a page fault, and pages of 4 KiB make reading 500 MB of weights wait for the
    kernel most of the time. Pieces begin at a large page's border, so that they lie in large pages from end to end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised array like `numpy.empty`, aligned to `ALIGNMENT`."""
        size = math.prod(shape) * dtype.itemsize
        if size > _PIECE_BYTES // 4:
            return _piece(size)[:size].view(dtype).reshape(shape)
        with self._lock:
            if size > len(self._rest):
                self._rest = _piece(_PIECE_BYTES)
            taken, self._rest = self._rest[:size], _aligned(self._rest[size:], ALIGNMENT)
        return taken.view(dtype).reshape(shape)


def _piece(size: int) -> np.ndarray:
    """Return memory of at least `size` bytes; what is more is not touched and so takes none."""
    return _aligned(np.empty(size + PAGE_BYTES, np.uint8), PAGE_BYTES)


def _aligned(memory: np.ndarray, border: int) -> np.ndarray:
    return memory[-memory.ctypes.data % border :]


_READERS = 2
_IN_FLIGHT = 4
"""Most parameters on the host at once, including the one being placed."""

HostValue = HostArray | HeldMatrix
"""A parameter on the host, or a view of it; a quantised one has an array for each part."""
Held = Parts | HeldMatrix
"""This process's parts of a parameter, or of each array of a parameter that is not held as one array."""


def place_all(
    targets: Iterable[Target], read: Callable[[Target], HostValue], mesh: jax.sharding.Mesh
) -> dict[StatePath, Value]:
    """Put a model's parameters on their devices and return them by path; layers are stacked where the targets say so.

    The host holds a few at a time, never the model. The largest come first: a parameter and the tensor that it is made
    from are in memory together, on a CPU next to all parameters that are placed already.

    Args:
        read: returns a target's value; called by worker threads. Its exceptions are raised here.

    Raises:
        NotBfloat16: a target to be held in bfloat16 for float32 products has other values.
    """
    values: dict[StatePath, Value] = {}
    largest_first = sorted(targets, key=lambda target: -math.prod(target.shape))
    for target, parts in _read_ahead(largest_first, read, mesh):
        likes = abstract_value(target, mesh, stacked=False)
        _store(values, target, jax.tree.map(lambda own, like: place(own, like.sharding), parts, likes), mesh)
    return values


def _store(values: dict[StatePath, Value], target: Target, value: Value, mesh: jax.sharding.Mesh) -> None:
    """Store a value in `values`, either whole or as a layer of its stack, in place; the first layer allocates the
    stack."""
    if target.layers is None:
        values[target.path] = value
        return
    if target.path not in values:
        likes = abstract_value(target, mesh)
        values[target.path] = jax.tree.map(lambda like: empty_stack(like.shape, like.dtype, like.sharding), likes)
    values[target.path] = jax.tree.map(
        lambda stack, part: set_layer(stack, part, target.index), values[target.path], value
    )


def _read_ahead(
    targets: Iterable[Target], read: Callable[[Target], HostValue], mesh: jax.sharding.Mesh
) -> Iterator[tuple[Target, Held]]:
    """Yield the targets, in order, each with this process's parts."""
    memory = HostMemory()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="jpaged-weights") as pool:
        waiting: deque[Any] = deque()
        for target in targets:
            waiting.append((target, pool.submit(_own_parts, target, read, mesh, memory)))
            if len(waiting) == _IN_FLIGHT:
                yield _wait(*waiting.popleft())
        while waiting:
            yield _wait(*waiting.popleft())


def _wait(target: Target, future: Future[Held]) -> tuple[Target, Held]:
    """Return a read's target and result.

    It is a separate function so that no frame keeps the future alive: a future holds the array, or an exception whose
    traceback would keep all placed parameters alive.
    """
    try:
        return target, future.result()
    finally:
        del future


def _own_parts(
    target: Target, read: Callable[[Target], HostValue], mesh: jax.sharding.Mesh, memory: HostMemory
) -> Held:
    likes, value = abstract_value(target, mesh, stacked=False), read(target)
    # One device takes the memory that a matrix is put in order in; several get copies of their parts.
    whole = memory.empty if mesh.size == 1 else np.empty
    if is_held(value):
        held: Any = value
        if target.tiled:
            assert isinstance(value, QuantisedMatrix | PermutedMatrix)
            held = with_codes(value, partial(tiled, empty=whole))
    elif target.panelled:
        held = panelled_floats(value, whole)
    elif target.tiled:
        assert target.source.contracted is not None
        try:
            held = tiled_floats(value, target.source.contracted, product=target.product, empty=whole)
        except NotBfloat16Error as error:
            raise NotBfloat16(target) from error
    else:
        held = value
    try:
        return jax.tree.map(lambda array, like: own_parts(array, like.dtype, like.sharding, memory.empty), held, likes)
    except OverflowError as error:
        raise ValueError(f"parameter {target.name}: {error}; use another dtype") from error

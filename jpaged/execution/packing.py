"""Packs the host arrays of a program's argument into one buffer, which the program takes apart.

A transfer to devices costs by the array, not by the byte: thirty small arrays take as long on one device as a small
program, and ten times as long on eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from jpaged.execution.mesh import DATA_AXIS, HostOrDevice, stack

WORD = 4
"""Bytes of an element of the buffer; each array begins with a new one."""

HOST = (np.ndarray, np.generic)
"""Types of leaves that lie on the host."""


class Part(NamedTuple):
    """Says where an array lies in the buffer.

    Attributes:
        start, stop: its words.
        shape, dtype: those of the array, within one replica.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def of(self, words: Int32[np.ndarray, "*replicas words"]) -> np.ndarray:
        """Return the array from a buffer of the host: a view, where that is of one replica."""
        elements = words[..., self.start : self.stop].view(self.dtype)[..., : prod(self.shape)]
        return elements.reshape(*words.shape[:-1], *self.shape)


@dataclass(frozen=True)
class Form:
    """Describes what was packed; equal trees of equal shapes have equal forms, so that they share a program.

    Attributes:
        tree: structure of the argument.
        parts: for each of its leaves where it lies in the buffer; None = it is on the devices already.
    """

    tree: Any
    parts: tuple[Part | None, ...]

    @cached_property
    def whereabouts(self) -> Any:
        """Return the argument's tree with the parts in the places of the leaves."""
        return jax.tree.unflatten(self.tree, self.parts)

    def __hash__(self) -> int:
        return self._hash  # each call of a program asks for it

    @cached_property
    def _hash(self) -> int:
        return hash((self.tree, self.parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return Form, (self.tree, self.parts)  # hashes of another process differ


@partial(jax.tree_util.register_dataclass, data_fields=("words", "placed"), meta_fields=("form",))
@dataclass(frozen=True)
class Packed:
    """An argument of a program whose host arrays are one buffer.

    Attributes:
        words: the arrays' bytes, one after the other; None where all are on the devices.
        placed: leaves that are on the devices already, in their order.
    """

    words: Int32[HostOrDevice, "*replicas words"] | None
    placed: tuple[Any, ...]
    form: Form


def pack(mesh: Mesh, tree: Any) -> Packed:
    """Return a tree with its NumPy arrays in one new buffer; one that is packed is returned unchanged.

    Args:
        tree: as `jpaged.execution.mesh.stack` makes it: where the mesh has replicas, all leaves have an axis of them,
            and the buffer has one too.
    """
    return tree if isinstance(tree, Packed) else packed(tree, stacked=DATA_AXIS in mesh.shape)


def packed(tree: Any, *, stacked: bool = False) -> Packed:
    """Return a tree with its NumPy arrays in one new buffer.

    Args:
        stacked: whether all leaves have an axis of replicas.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [_as_taken(leaf) for leaf in leaves if isinstance(leaf, HOST)]
    placed = [leaf for leaf in leaves if not isinstance(leaf, HOST)]
    shapes = [(array.shape[stacked:], array.dtype) for array in arrays]
    form = _form(structure, tuple(isinstance(leaf, HOST) for leaf in leaves), tuple(shapes))
    # A new buffer for every call: a CPU's program reads it where it is.
    words = np.concatenate([_words(array, stacked) for array in arrays], axis=-1) if arrays else None
    return Packed(words, tuple(placed), form)


def stacked(mesh: Mesh, each: Sequence[Any]) -> Any:
    """Return what a program takes of several replicas' arguments, packed or not; see `jpaged.execution.mesh.stack`."""
    first = each[0]
    if len(each) == 1:
        return stack(mesh, each)
    if all(isinstance(one, Packed) and one.form == first.form and not one.placed for one in each):
        return replace(first, words=np.stack([one.words for one in each]))
    return stack(mesh, [opened(one) for one in each])


def opened(argument: Any) -> Any:
    """Return the tree of which `pack` made the argument, on the host, as views of its buffer where that is of one
    replica; any other argument is returned unchanged."""
    if not isinstance(argument, Packed):
        return argument
    placed, words = iter(argument.placed), argument.words
    assert isinstance(words, np.ndarray)
    leaves = [next(placed) if part is None else part.of(words) for part in argument.form.parts]
    return jax.tree.unflatten(argument.form.tree, leaves)


def unpacked(argument: Any) -> Any:
    """Return the tree of which `pack` made the argument, within a program and of one replica; any other argument is
    returned as it is."""
    if not isinstance(argument, Packed):
        return argument
    placed, words = iter(argument.placed), argument.words
    leaves = [next(placed) if part is None else _read(jnp.asarray(words), part) for part in argument.form.parts]
    return jax.tree.unflatten(argument.form.tree, leaves)


@lru_cache(maxsize=1024)
def _form(tree: Any, on_host: tuple[bool, ...], shapes: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> Form:
    parts: list[Part] = []
    stop = 0
    for shape, dtype in shapes:
        start, stop = stop, stop - (-prod(shape) * dtype.itemsize // WORD)
        parts.append(Part(start, stop, shape, dtype))
    packed = iter(parts)
    return Form(tree, tuple(next(packed) if host else None for host in on_host))


def _as_taken(array: np.ndarray | np.generic) -> np.ndarray:
    """Return an array in the dtype that `jax.jit` would take it in: without x64, of 32 bits at most."""
    if array.dtype.itemsize > WORD or isinstance(array, np.generic):
        return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return array


def _words(array: np.ndarray, stacked: bool) -> Int32[np.ndarray, "*replicas words"]:
    """Return an array's bytes as words, of each replica; the last word is filled up with zeros."""
    flat = array.reshape(len(array), -1) if stacked else array.ravel()
    size = flat.dtype.itemsize
    if size != WORD and (missing := -flat.shape[-1] * size % WORD // size):
        flat = np.concatenate([flat, np.zeros((*flat.shape[:-1], missing), flat.dtype)], axis=-1)
    return flat if flat.dtype == np.int32 else np.ascontiguousarray(flat).view(np.int32)


def _read(words: Int32[Array, " words"], part: Part) -> Array:
    """Return an array from its place in the buffer."""
    own = lax.slice(words, (part.start,), (part.stop,))
    size = prod(part.shape)
    if part.dtype == np.bool_:
        elements = lax.bitcast_convert_type(own, np.uint8).reshape(-1)[:size] != 0
    elif part.dtype.itemsize == WORD:
        elements = lax.bitcast_convert_type(own, part.dtype)
    else:
        elements = lax.bitcast_convert_type(own, part.dtype).reshape(-1)[:size]
    return elements.reshape(part.shape)

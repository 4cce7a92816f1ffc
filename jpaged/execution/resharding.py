"""Moves arrays to other devices and shardings without the host.

`jax.device_put` goes from device to device where each part that a device wants is a part that another one has. Else it
brings the array to the host and cuts it there, on the same devices too where they have the same order (jax 0.10.2,
`jax._src.array.shard_sharded_device_array_slow_path`). Here the array is cut on its own devices first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def reshard(tree: Any, shardings: Any, *, copy: bool = False) -> Any:
    """Return arrays as `shardings` say, from device to device; those of NumPy come from the host.

    Args:
        tree: arrays; they are not donated.
        shardings: a tree of the same structure.
        copy: whether the arrays are new ones even where they lie so already.
    """

    def moved(array: Any, sharding: NamedSharding) -> jax.Array:
        if not _is_cut(array, sharding):
            put = jax.device_put(array, sharding, may_alias=False if copy else None)
            return _unshared(put, array) if copy else put
        cut = _cut(array, sharding)
        put = jax.device_put(cut, sharding)
        put.block_until_ready()  # so that what was cut is let go of before the next array is
        return _unshared(put, array) if copy and array.is_fully_replicated else put

    return jax.tree.map(moved, tree, shardings)


def cuts_on_devices(tree: Any, shardings: Any) -> bool:
    """Tell whether `reshard` would run programs on devices of `shardings` that span several.

    If another thread ran programs on them at the same time, the two could wait for each other.
    """

    def cuts(array: Any, sharding: NamedSharding) -> bool:
        devices = sharding.device_set
        return len(devices) > 1 and _is_cut(array, sharding) and bool(devices & array.sharding.device_set)

    return any(jax.tree.leaves(jax.tree.map(cuts, tree, shardings)))


def _unshared(moved: jax.Array, before: Any) -> jax.Array:
    """Return an unshared array: if the sharding changes, `jax.device_put` reuses parts that are in the right place
    already, even with ``may_alias=False``."""
    if not isinstance(before, jax.Array) or moved.sharding == before.sharding:
        return moved
    return jnp.copy(moved) if moved.sharding.device_set & before.sharding.device_set else moved


def _is_cut(array: Any, sharding: NamedSharding) -> bool:
    """Tell whether `sharding` wants parts that the array, which has several, has not."""
    if not isinstance(array, jax.Array) or not array.is_fully_addressable:
        return False
    return array.sharding.num_devices > 1 and not _has_parts(array, sharding)


def _cut(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the array in parts, on its own devices, of which each is one that `sharding` wants."""
    devices, wanted = _devices(array.sharding), sharding.mesh.devices
    kind = sharding.memory_kind
    if len(devices) % wanted.size == 0:
        mesh = Mesh(devices.reshape(-1, *wanted.shape), ("copy", *sharding.mesh.axis_names))
        return _on_own_devices(array, NamedSharding(mesh, sharding.spec, memory_kind=kind))
    whole = _on_own_devices(array, NamedSharding(Mesh(devices, ("copy",)), PartitionSpec(), memory_kind=kind))
    return whole.addressable_shards[0].data


def _on_own_devices(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.jit(_same, out_shardings=sharding)(array)


def _same(array: jax.Array) -> jax.Array:
    return array


def _devices(sharding: Any) -> np.ndarray:
    """Return a sharding's devices in the order in which its programs run on them."""
    if isinstance(sharding, NamedSharding):
        return sharding.mesh.devices.reshape(-1)
    return np.array(list(sharding._device_assignment))  # a GSPMDSharding's order has no public name


def _has_parts(array: jax.Array, sharding: NamedSharding) -> bool:
    """Tell whether each part that `sharding` wants is one of the array's."""

    def parts(sharding: Any) -> set[str]:
        return {str(index) for index in sharding.devices_indices_map(array.shape).values()}

    return parts(sharding) <= parts(array.sharding)

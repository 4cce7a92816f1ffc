"""Prints which arrays are others after they were resharded; run with 8 virtual devices."""

from __future__ import annotations

import itertools
import json

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from on_the_host import nothing_large_on_the_host

from jpaged.execution.resharding import cuts_on_devices, reshard


def main() -> None:
    devices = np.array(jax.devices())
    two, four = Mesh(devices[:2], ("tensor",)), Mesh(devices[2:6], ("fsdp",))
    six, grid = Mesh(devices[:6], ("x",)), Mesh(devices[[7, 3, 0, 4]].reshape(2, 2), ("data", "tensor"))
    back = Mesh(devices[1::-1], ("tensor",))
    shardings = [
        NamedSharding(two, P(None, "tensor")),
        NamedSharding(back, P("tensor")),
        NamedSharding(four, P("fsdp")),
        NamedSharding(four, P()),
        NamedSharding(six, P("x")),
        NamedSharding(grid, P("tensor", "data")),
    ]
    numbers = np.arange(24 * 48, dtype=np.float32).reshape(24, 48)
    wrong, cases, shared = [], 0, 0
    for (begin, end), copy in itertools.product(
        itertools.product([*shardings, SingleDeviceSharding(devices[5])], shardings), (False, True)
    ):
        array = jax.device_put(numbers, begin)
        with nothing_large_on_the_host():
            (moved,) = reshard([array], [end], copy=copy)
        cases += 1
        if moved.sharding != end or (np.asarray(moved) != numbers).any():
            wrong.append(f"{begin} -> {end}")
        if copy:
            of = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
            shared += any(shard.data.unsafe_buffer_pointer() in of for shard in moved.addressable_shards)
    elsewhere = jax.device_put(numbers, shardings[2])
    try:
        with nothing_large_on_the_host():
            jax.device_put(elsewhere, shardings[0])
        seen = False
    except AssertionError:
        seen = True
    halves = jax.device_put(numbers, shardings[0])
    on_devices = [cuts_on_devices([array], [shardings[1]]) for array in (halves, elsewhere, numbers)]
    print(json.dumps({"cases": cases, "wrong": wrong, "shared": shared, "seen": seen, "on_devices": on_devices}))


if __name__ == "__main__":
    main()

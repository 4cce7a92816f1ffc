"""Ask the TPU compiler how much memory a program may take on each topology, by compiling one that takes far more.

Run by `test_aot_plan.py` inside the environment with libtpu: prints JSON, bytes by topology, rounded as the compiler's
message is.
"""

from __future__ import annotations

import json
import re
import sys

import jax
import jax.numpy as jnp

from jpaged.execution.mesh import sharding
from jpaged.model_api import TENSOR_AXIS
from jpaged.planning import find_device
from jpaged.planning.target_mesh import target_mesh


def allowed(name: str) -> float:
    """GiB that a program may take of each device of `name`."""
    mesh = target_mesh(find_device(name), compiled=True)
    huge = jax.ShapeDtypeStruct((mesh.size, 400 << 20, 1024), jnp.int8, sharding=sharding(mesh, TENSOR_AXIS))
    try:
        jax.jit(lambda x: x + 1).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"available HBM \(([\d.]+)G\)", str(error))
        assert found is not None, error
        return float(found.group(1))
    raise AssertionError(f"{name} took 400 GiB")


if __name__ == "__main__":
    print(json.dumps({name: allowed(name) for name in sys.argv[1:]}))

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jpaged.loading.parameters.placement import empty_stack, own_parts, place, set_layer
from jpaged.loading.parameters.targets import sharding_of
from jpaged.model_api import TENSOR_AXIS


def mesh():
    return Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))


def test_a_stack_is_never_split_over_its_layers():
    assert sharding_of(mesh(), P(TENSOR_AXIS, None)).spec == P(TENSOR_AXIS, None)
    assert sharding_of(mesh(), P(TENSOR_AXIS, None), stacked=True).spec == P(None, TENSOR_AXIS, None)


def test_transposed_and_read_only_arrays_are_placed_and_cast():
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    array.flags.writeable = False
    sharding = sharding_of(mesh(), P(None, None))
    placed = place(own_parts(array, np.dtype(jnp.bfloat16), sharding), sharding)
    assert placed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(placed, np.float32), array)


def test_a_stack_is_filled_in_place():
    sharding = sharding_of(mesh(), P(None), stacked=True)
    stack = empty_stack((3, 1 << 12), np.dtype(np.float32), sharding)
    address = stack.unsafe_buffer_pointer()
    whole = sharding_of(mesh(), P(None))
    value = place(own_parts(np.ones(1 << 12, np.float32), np.dtype(np.float32), whole), whole)
    filled = set_layer(stack, value, 1)
    assert stack.is_deleted()
    assert filled.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(filled.sum(axis=1), [0, 1 << 12, 0])


def test_each_device_reads_only_its_own_part():
    script = Path(__file__).parents[1] / "sharded_placement.py"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

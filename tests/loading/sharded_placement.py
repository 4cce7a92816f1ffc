"""Run by test_placement with four devices."""

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jpaged.loading.parameters.placement import empty_stack, own_parts, place, set_layer
from jpaged.loading.parameters.targets import sharding_of
from jpaged.model_api import TENSOR_AXIS


class Recorder:
    """Stands for a file view: notes which parts are cut out of it."""

    def __init__(self, array):
        self.array, self.shape, self.parts = array, array.shape, []

    def __getitem__(self, index):
        self.parts.append(self.array[index].shape)
        return self.array[index]


mesh = Mesh(np.array(jax.devices()), (TENSOR_AXIS,))
array = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
recorder = Recorder(array)
by_rows = sharding_of(mesh, P(TENSOR_AXIS, None))
placed = place(own_parts(recorder, array.dtype, by_rows), by_rows)
np.testing.assert_array_equal(placed, array)
assert recorder.parts == [(2, 6)] * 4, recorder.parts

stack = empty_stack((3, 8, 6), array.dtype, sharding_of(mesh, P(TENSOR_AXIS, None), stacked=True))
filled = set_layer(stack, placed, 2)
assert stack.is_deleted()
assert filled.sharding.spec == P(None, TENSOR_AXIS, None), filled.sharding
assert {shard.data.shape for shard in filled.addressable_shards} == {(3, 2, 6)}
np.testing.assert_array_equal(filled[2], array)
assert not filled[:2].any()

import ctypes
import resource
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import make_checkpoint
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from on_devices import run_on_devices

from jpaged.loading import load_model
from jpaged.loading.gguf.blocks import dequantise
from jpaged.loading.gguf.rows import GGUFRows
from jpaged.loading.parameters import placement
from jpaged.loading.parameters.placement import HostMemory, empty_stack, own_parts, place, set_layer
from jpaged.loading.parameters.targets import sharding_of
from jpaged.model_api import TENSOR_AXIS, Bfloat16Tiles
from pallas_kernels.panelled_floats import panelled_floats
from pallas_kernels.quantised import INT8, QuantisedMatrix
from pallas_kernels.tiled import tiled
from pallas_kernels.tiled_floats import tiled_floats

PR_SET_THP_DISABLE = 41
NO_CUT = (slice(None), slice(None))


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
    done = run_on_devices(4, Path(__file__).parents[1] / "sharded_placement.py")
    assert done.returncode == 0, done.stderr


def touched(run):
    """The bytes of pages that the calling thread had not touched before, where Linux gives small pages only."""
    disable = partial(ctypes.CDLL(None).prctl, PR_SET_THP_DISABLE)
    assert disable(1, 0, 0, 0) == 0
    try:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        held = run(HostMemory().empty)
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    finally:
        disable(0, 0, 0, 0)
    return held, faults * resource.getpagesize()


def of_gguf(rows, values):
    """A matrix of a GGUF file in Q4_1, [rows, values], that is decoded where it is sliced."""
    kind = GGMLQuantizationType.Q4_1
    unit, items = GGML_QUANT_SIZES[kind]
    stored = np.zeros((rows, values // unit * items), np.uint8)
    return GGUFRows(
        stored, partial(dequantise, encoding=kind), unit, items, np.dtype(np.float32), range(rows), range(values)
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the faults of a thread")
@pytest.mark.parametrize("held", ["array", "panels", "tiles", "codes"])
def test_weights_touch_the_memory_that_stays_and_little_more(held):
    rows, values = 4096, 1536  # 24 MiB of float32
    whole = sharding_of(mesh(), P(None, None))
    matrix = QuantisedMatrix(np.ones((values, rows), np.int8), np.ones((1, rows), np.float32), None, -2, INT8)
    floats = np.ones((rows, values), jnp.bfloat16)
    make = {
        "array": lambda empty: own_parts(of_gguf(rows, values), np.dtype(np.float32), whole, empty)[NO_CUT],
        "panels": lambda empty: panelled_floats(of_gguf(rows, values).T, empty).numbers,
        "tiles": lambda empty: tiled_floats(floats.T, -2, product="float32", empty=empty).bits,
        "codes": lambda empty: tiled(matrix, empty).codes,
    }[held]
    make(np.empty)  # what malloc keeps, and code
    array, size = touched(make)
    assert size < 1.1 * array.nbytes + (3 << 20), (size, array.nbytes)


@pytest.mark.parametrize(
    ("maker", "quantization", "dtype"),
    [("panelled_floats", None, "float32"), ("tiled_floats", None, "bfloat16"), ("tiled", "int8", "float32")],
)
def test_a_device_takes_the_memory_that_a_matrix_is_put_in_order_in(maker, quantization, dtype, tmp_path, monkeypatch):
    places, make = [], getattr(placement, maker)

    def recorded(*args, **kwargs):
        held = make(*args, **kwargs)
        places.extend(part.ctypes.data for part in jax.tree.leaves(held))
        return held

    monkeypatch.setattr(placement, maker, recorded)
    make_checkpoint("llama", tmp_path)
    loaded = load_model(tmp_path, dtype=dtype, quantization=quantization, compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT)
    held = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(loaded.params)}
    assert places and set(places) <= held

"""What a program takes apart is what was packed, bit for bit, and equal shapes share a program."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from jax.sharding import Mesh

from jpaged.execution.mesh import DATA_AXIS, make_mesh, stack
from jpaged.execution.packing import Packed, opened, pack, packed, stacked, unpacked

DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "float32")
MESH = make_mesh(1)


def drawn(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return an array of any bits, NaNs with their payloads among them."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.random(shape) < 0.5
    of = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.frombuffer(random.bytes(int(np.prod(shape)) * of.itemsize), of).reshape(shape)


def bits(array: Any) -> tuple[tuple[int, ...], np.dtype, bytes]:
    held = np.asarray(array)
    return held.shape, held.dtype, held.tobytes()


leaves = st.builds(
    drawn, st.sampled_from(DTYPES), array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5), st.integers(0, 99)
)
trees = st.recursive(leaves | st.none(), lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner))


@given(tree=trees)
@settings(max_examples=12, deadline=None)
def test_a_tree_comes_out_of_its_buffer_bit_for_bit(tree: Any):
    found = jax.jit(unpacked)(pack(MESH, tree))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert [*map(bits, jax.tree.leaves(found))] == [*map(bits, jax.tree.leaves(tree))]


@pytest.mark.parametrize("shape", [(3, 5), (), (0,)])
def test_every_dtype_comes_out_of_its_buffer(shape: tuple[int, ...]):
    tree = {dtype: drawn(dtype, shape, 0) for dtype in DTYPES}
    found = jax.jit(unpacked)(pack(MESH, tree))
    assert [*map(bits, jax.tree.leaves(found))] == [*map(bits, jax.tree.leaves(tree))]


def test_the_host_sends_one_array():
    tree = [np.zeros(3, np.int32), np.ones((2, 2), np.float32), np.array([True])]
    (words,) = jax.tree.leaves(pack(MESH, tree))
    assert words.shape == (3 + 4 + 1,)


def test_arrays_on_the_devices_stay_there():
    there = jax.numpy.arange(3)
    packed = pack(MESH, {"a": np.arange(2, dtype=np.int32), "b": there, "c": np.float32(0.5)})
    assert packed.placed == (there,)
    found = unpacked(packed)
    assert found["b"] is there
    assert found["c"] == 0.5


def test_nothing_is_sent_where_all_is_on_the_devices():
    there = jax.numpy.arange(3)
    packed = pack(MESH, (there, None))
    assert packed.words is None
    assert unpacked(packed) == (there, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_replica_has_a_row_of_the_buffer(dtype: str):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), (DATA_AXIS, "tensor"))
    tree = [drawn(dtype, (2, 3), 0), drawn("int32", (2,), 1), drawn("bool", (2, 1, 5), 2)]
    packed = pack(mesh, tree)
    assert packed.words is not None
    assert len(packed.words) == 2
    for replica in range(2):
        own = jax.tree.map(lambda leaf, replica=replica: leaf[replica], (packed, tree))
        found, wanted = unpacked(own[0]), own[1]
        assert [*map(bits, found)] == [*map(bits, wanted)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_replicas_are_those_that_are_packed_together(dtype: str):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), (DATA_AXIS, "tensor"))
    trees = [[drawn(dtype, (3, 2), seed), drawn("bool", (1, 5), seed)] for seed in (0, 1)]
    together, found = pack(mesh, stack(mesh, trees)), stacked(mesh, [*map(packed, trees)])
    assert found.form == together.form
    assert np.array_equal(found.words, together.words)
    assert [*map(bits, opened(found))] == [*map(bits, stack(mesh, trees))]
    apart = stacked(mesh, [packed(trees[0]), trees[1]])
    assert [*map(bits, apart)] == [*map(bits, stack(mesh, trees))]


def test_equal_shapes_share_a_program_and_others_do_not():
    traced = []

    @jax.jit
    def program(packed: Packed) -> Any:
        traced.append(packed.form)
        return unpacked(packed)

    for shape in ((2, 3), (2, 3), (3, 2)):
        program(pack(MESH, [np.zeros(shape, np.int32)]))
    assert len(traced) == 2


def test_every_call_gets_a_new_buffer():
    only = np.arange(4, dtype=np.int32)
    packed = pack(MESH, [only])
    only += 1
    assert packed.words is not None
    assert np.array_equal(packed.words, np.arange(4))


def test_numbers_of_64_bits_are_taken_as_jax_takes_them():
    (found,) = unpacked(pack(MESH, [np.array([1, -2])]))
    assert found.dtype == np.int32
    assert found.tolist() == [1, -2]


@pytest.mark.parametrize("arguments", [np.arange(3), (1, 2), None])
def test_what_was_not_packed_is_returned_as_it_is(arguments: Any):
    assert unpacked(arguments) is arguments

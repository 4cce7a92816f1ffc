import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from toy_family import Toy, toy_config, toy_tensors

from jpaged.loading.build_context import build_context
from jpaged.loading.parameters.weights import abstract_params, load_params
from jpaged.model_api import TENSOR_AXIS


class Tensors:
    """A reader of arrays in memory that counts what is read."""

    location, quantised, stored_dtype = "memory", False, np.dtype(np.float32)

    def __init__(self, tensors):
        self.tensors, self.reads = tensors, []

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name):
        self.reads.append(name)
        return self.tensors[name]


def load(tensors, config=None, *, dtype=jnp.float32, stacked=False):
    mesh = Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
    reader = Tensors(tensors)
    build = build_context(mesh, dtype, stacked=stacked, kernel_impl="xla")  # a CPU's own computes in float32 always
    model, graphdef, params = load_params(Toy, config or toy_config(), reader, build, mesh=mesh)
    return model, nnx.merge(graphdef, params), reader


@pytest.mark.parametrize("stacked", [False, True])
def test_every_parameter_gets_its_converted_tensors(stacked):
    tensors = toy_tensors(toy_config())
    _, toy, reader = load(tensors, stacked=stacked)
    np.testing.assert_array_equal(toy.embed[...], tensors["embed"])
    for n in range(3):
        matrix = toy.layers.matrix[n] if stacked else toy.layers[n].matrix[...]
        expected = np.concatenate([tensors[f"layers.{n}.a"].T, tensors[f"layers.{n}.b"].T], axis=1)
        np.testing.assert_array_equal(matrix, expected)
        norm = toy.layers.norm[n] if stacked else toy.layers[n].norm[...]
        np.testing.assert_array_equal(norm, tensors[f"layers.{n}.norm"])
    assert sorted(reader.reads) == sorted(tensors), "each tensor is read once"


@pytest.mark.parametrize("stored", [np.float16, np.float32, jnp.bfloat16])
@pytest.mark.parametrize("held", [jnp.float32, jnp.bfloat16])
def test_values_are_cast_to_the_dtype_the_model_declares(stored, held):
    tensors = toy_tensors(toy_config(), stored)
    _, toy, _ = load(tensors, dtype=held)
    assert toy.embed[...].dtype == held
    assert toy.layers[0].norm[...].dtype == jnp.float32
    np.testing.assert_array_equal(toy.embed[...], tensors["embed"].astype(np.float32).astype(held))


def test_the_abstract_model_holds_shapes_only():
    model, _, _ = load(toy_tensors(toy_config()))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize("stacked", [False, True])
def test_abstract_parameters_are_shaped_and_placed_as_the_loaded_ones(stacked):
    model, toy, _ = load(toy_tensors(toy_config()), stacked=stacked)
    params = nnx.state(toy)
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    abstract = abstract_params(model, mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    for like, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True):
        assert (like.shape, like.dtype) == (leaf.shape, leaf.dtype)
        assert like.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_a_missing_tensor_is_named_with_its_parameter():
    tensors = toy_tensors(toy_config())
    del tensors["layers.1.b"]
    with pytest.raises(ValueError, match=r"memory has no tensor layers\.1\.b.*layers\.1\.matrix"):
        load(tensors)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_wrong_shape_names_parameter_tensor_and_both_shapes(stacked):
    tensors = toy_tensors(toy_config())
    tensors["layers.2.norm"] = np.zeros(9, np.float32)
    parameter = r"layers\.norm\[2\]" if stacked else r"layers\.2\.norm"
    with pytest.raises(ValueError, match=parameter + r" .*\(8,\).*layers\.2\.norm \(9,\)"):
        load(tensors, stacked=stacked)


def test_tensors_that_do_not_fit_together_are_named_with_their_shapes():
    tensors = toy_tensors(toy_config())
    tensors["layers.0.b"] = np.zeros((8, 9), np.float32)
    with pytest.raises(ValueError, match=r"layers\.0\.matrix.*layers\.0\.a \(8, 8\), layers\.0\.b \(8, 9\)"):
        load(tensors)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_parameter_without_a_source_is_refused(stacked):
    with pytest.raises(ValueError, match=r"norm.* has no source"):
        load(toy_tensors(toy_config()), toy_config(left_out=["norm1"]), stacked=stacked)


def test_a_parameter_with_two_sources_is_refused():
    with pytest.raises(ValueError, match=r"layers\.1\.norm has two sources"):
        load(toy_tensors(toy_config()), toy_config(twice=["norm1"]))


def test_tensors_nobody_reads_are_reported():
    tensors = toy_tensors(toy_config()) | {"vision.extra": np.zeros(2, np.float32)}
    with pytest.warns(UserWarning, match=r"1 tensors were not used, first: vision\.extra"):
        load(tensors)


def test_tied_heads_and_rotary_tables_are_not_reported(recwarn):
    redundant = ("lm_head.weight", "layers.0.rotary_emb.inv_freq")
    load(toy_tensors(toy_config()) | {name: np.zeros(2, np.float32) for name in redundant})
    assert not recwarn

"""Which parameters are held in bfloat16 as they are: those whose tensors all are stored so and only moved. The other
matrices are held in panels of float32."""

from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from dense_model import run_dense
from flax import nnx

from jpaged.execution.params import num_compact, to_float32
from jpaged.loading import load_model
from jpaged.loading.load import convert_checkpoint
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.orbax.checkpoint import save_checkpoint
from jpaged.loading.parameters import weights
from jpaged.loading.parameters.targets import compact_paths, targets_of
from jpaged.loading.tensor_reader import StoredAs
from jpaged.model_api import Bfloat16Tiles
from pallas_kernels.panelled_floats import PanelledFloats
from pallas_kernels.tiled_floats import TiledFloats, has_float32_product

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", path).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def targets(folder):
    return targets_of(load_model(folder, dtype="float32", compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT).model)


def paths_of(targets):
    """Those that ask for tiles and have an even number of inputs."""
    asked = [target for target in targets if target.source.bfloat16_tiles]
    return {target.source.path for target in asked if has_float32_product(target.shape, target.source.contracted)}


def test_all_matrices_of_a_bfloat16_checkpoint_are_but_those_of_an_odd_number_of_inputs(targets):
    found = compact_paths(targets, StoredAs(BFLOAT16, False).dtype)
    assert found == paths_of(targets) and len(found) >= 4
    assert ("mlp", "down", "weight") not in found


@pytest.mark.parametrize("stored", [StoredAs(np.dtype(np.float32), False), StoredAs(BFLOAT16, True)])
def test_none_of_a_float32_or_quantised_checkpoint_is(targets, stored):
    assert not compact_paths(targets, stored.dtype)


def test_one_tensor_in_float32_keeps_its_parameter_float32_in_all_layers(targets):
    def dtype_of(name):
        return np.dtype(np.float32) if name == "model.layers.1.self_attn.k_proj.weight" else BFLOAT16

    assert paths_of(targets) - compact_paths(targets, dtype_of) == {("attention", "qkv", "weight")}


def test_a_tensor_that_is_missing_is_left_to_whoever_reads_it(targets):
    def dtype_of(name):
        raise KeyError(name)

    assert not compact_paths(targets, dtype_of)


@pytest.mark.parametrize("kind", ["folder", "orbax"])
def test_readers_tell_what_tensors_are_stored_in(kind, folder, tmp_path):
    if kind == "orbax":
        convert_checkpoint(folder, tmp_path / "saved")
    reader = open_model(folder if kind == "folder" else tmp_path / "saved").reader
    assert all(reader.dtype(name) == BFLOAT16 for name in reader.names())
    with pytest.raises(KeyError):
        reader.dtype("nobody")


def test_a_parameter_that_its_family_computes_is_held_in_float32_and_not_rounded(folder, monkeypatch, caplog):
    path = ("attention", "out", "weight")

    def computed(target):
        if target.source.path != path:
            return target
        return replace(
            target,
            source=replace(
                target.source, convert=lambda *parts: 1.01 * np.asarray(target.source.convert(*parts), np.float32)
            ),
        )

    monkeypatch.setattr(weights, "targets_of", lambda *given: [computed(target) for target in targets_of(*given)])
    with caplog.at_level("INFO", "jpaged"):
        tiled = load_model(folder, dtype="float32", compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT)
    assert "attention.out.weight: held in float32" in caplog.text
    plain = load_model(folder, dtype="float32")
    assert 0 < num_tiles(tiled.params) < num_tiles(load_model_as_it_is(folder, monkeypatch).params)
    for one, other in zip(jax.tree.leaves(to_float32(tiled.params)), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_array_equal(one, other)


def num_tiles(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, TiledFloats))
    return sum(isinstance(leaf, TiledFloats) for leaf in leaves)


def load_model_as_it_is(folder, monkeypatch):
    monkeypatch.setattr(weights, "targets_of", targets_of)
    return load_model(folder, dtype="float32", compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT)


def test_tables_stay_float32_where_the_same_bits_are_asked_for(folder):
    params = load_model(folder, dtype="float32", compact_tiles=Bfloat16Tiles.FLOAT32_BITS).params
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, TiledFloats))
    tiles = [leaf for leaf in leaves if isinstance(leaf, TiledFloats)]
    assert tiles and all(matrix.axis == -2 for matrix in tiles)


def panels_of(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, PanelledFloats))
    return [leaf for leaf in leaves if isinstance(leaf, PanelledFloats)]


@pytest.mark.parametrize("kind", ["folder", "orbax"])
def test_matrices_of_a_float32_checkpoint_are_held_in_panels_and_computed_with_to_the_same_bits(kind, tmp_path):
    make_checkpoint("llama", tmp_path / "folder")
    convert_checkpoint(tmp_path / "folder", tmp_path / "orbax")
    held, plain = (
        load_model(tmp_path / kind, dtype="float32", compact_tiles=tiles)
        for tiles in (Bfloat16Tiles.FLOAT32_PRODUCT, None)
    )
    assert len(panels_of(held.params)) == num_compact(held.params) > 0 and not num_compact(plain.params)
    for one, other in zip(jax.tree.leaves(to_float32(held.params)), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_array_equal(one, other)
    logits = [run_dense(nnx.merge(loaded.graphdef, loaded.params), np.arange(3, 23)) for loaded in (held, plain)]
    np.testing.assert_array_equal(*logits)


def test_an_engine_that_promises_the_bits_of_arrays_holds_float32_as_arrays(tmp_path):
    make_checkpoint("llama", tmp_path)
    assert not num_compact(load_model(tmp_path, dtype="float32", compact_tiles=Bfloat16Tiles.FLOAT32_BITS).params)


def test_panels_are_saved_as_the_arrays_they_stand_for(tmp_path):
    make_checkpoint("llama", tmp_path / "folder")
    held = load_model(tmp_path / "folder", dtype="float32", compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT)
    save_checkpoint(tmp_path / "saved", held)
    again = load_model(tmp_path / "saved", dtype="float32")
    for one, other in zip(jax.tree.leaves(to_float32(held.params)), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_quantised_is_not(folder, quantization):
    assert not num_compact(
        load_model(
            folder, dtype="float32", compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT, quantization=quantization
        ).params
    )

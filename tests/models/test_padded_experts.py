"""Experts' columns that fill no registers are padded with zeros where TPUs run the model, and nothing else changes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from dense_model import run_dense
from flax import nnx
from mxfp4_checkpoint import make_mxfp4

from jpaged.loading import load_model
from jpaged.loading.orbax.checkpoint import save_checkpoint
from jpaged.loading.parameters.targets import flat_values
from jpaged.model_api import BuildContext
from jpaged.training.model import TrainableModel
from models.experts import ExpertMLPs
from models.mixture import ExpertLayout
from pallas_kernels.expert_mlps import expert_mlps
from pallas_kernels.quantised import QuantisedMatrix

TOKENS = np.random.default_rng(0).integers(3, 211, 16)
FORMS = ["floats", "MXFP4"]
ONE_OF_EACH = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture
def on_a_tpu(monkeypatch):
    monkeypatch.setattr("jpaged.loading.build_context._product_impl", lambda mesh, impl: "tpu_interpret")


def logits_of(loaded):
    found = run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)
    return np.asarray(found, np.float32)[:, : loaded.model.vocab_size]


def experts_of(loaded):
    """Return the shapes of the experts' parameters in the first layer."""
    found = {path[-2:]: value.shape for path, value in flat_values(loaded.params).items() if "experts" in path}
    return {path: shape for path, shape in found.items() if path[0] in ("gate_up", "down")}


@pytest.mark.parametrize(
    ("columns", "devices", "whole", "held"),
    [
        (2880, 1, False, 2944),
        (2880, 8, True, 2944),
        (2880, 8, False, 8 * 384),
        (768, 8, False, 8 * 128),
        (704, 8, False, 704),
        (512, 8, False, 512),
        (1408, 1, False, 1408),
    ],
)
def test_a_device_has_whole_registers_of_columns_where_that_adds_at_most_a_third(columns, devices, whole, held):
    found = ExpertLayout(32, devices, whole).columns(columns, 128)
    assert (found.size, found.stored) == (held, columns)
    assert ExpertLayout(32, devices, whole).columns(columns, 1).size == columns


@pytest.mark.parametrize(
    ("options", "held"), [({}, 384), ({"weighs_inputs": True}, 320), ({"activation": "gelu"}, 320)]
)
def test_columns_that_no_launch_takes_are_not_padded(options, held):
    layout, build = ExpertLayout(2, 1, False), BuildContext(dtype=np.dtype("float32"), column_unit=128)
    experts = nnx.eval_shape(
        lambda: ExpertMLPs(
            320, 320, layout=layout, **{"activation": "silu"} | options, build=replace(build, rngs=nnx.Rngs(0))
        )
    )
    assert experts.width.size == experts.embed.size == held


def test_training_builds_the_model_that_was_loaded(tmp_path, monkeypatch):
    make_checkpoint("gpt_oss", tmp_path, **ONE_OF_EACH)
    with monkeypatch.context() as on_a_tpu:
        on_a_tpu.setattr("jpaged.loading.build_context._product_impl", lambda mesh, impl: "tpu_interpret")
        loaded = load_model(tmp_path, dtype="float32")
    trained = nnx.merge(TrainableModel.of(loaded).graphdef, loaded.params)
    widths = [node.width.size % 128 for _, node in nnx.iter_graph(trained) if type(node).__name__ == "ClampedExperts"]
    assert widths == [0, 0]


@pytest.mark.parametrize("make", [lambda path: make_checkpoint("gpt_oss", path, **ONE_OF_EACH), make_mxfp4], ids=FORMS)
def test_a_padded_model_computes_what_transformers_does(make, tmp_path, on_a_tpu):
    """In float32, which XLA multiplies, to the last digits; codes are padded as values are."""
    model = make(tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    embed, columns = model.config.hidden_size, model.config.intermediate_size
    assert columns % 128 and embed % 128
    shapes, held = experts_of(loaded), -(-columns // 128) * 128
    assert shapes["gate_up", "weight"] == (5, embed, 2 * held) and shapes["gate_up", "bias"] == (5, 2 * held)
    assert shapes["down", "weight"] == (5, held, 128) and shapes["down", "bias"] == (5, 128)
    with torch.inference_mode():
        want = model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits_of(loaded), want, atol=5e-5 * np.abs(want).max())


@pytest.mark.parametrize("quantised", [False, True], ids=FORMS)
def test_its_launches_compute_the_same_but_for_rounding(quantised, tmp_path, on_a_tpu, monkeypatch):
    make = make_mxfp4 if quantised else lambda path: make_checkpoint("gpt_oss", path, **ONE_OF_EACH)
    model = make(tmp_path)
    loaded = load_model(tmp_path, dtype="bfloat16", stacked=True)
    leaves = jax.tree.leaves(loaded.params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    assert any(isinstance(leaf, QuantisedMatrix) for leaf in leaves) == quantised
    launched = []
    monkeypatch.setattr(
        "jpaged_models.experts.expert_mlps",
        lambda *args, **options: launched.append(1) or expert_mlps(*args, **options),
    )
    with torch.inference_mode():
        want = model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    error = error_of(logits_of(loaded), want)
    assert launched
    monkeypatch.setattr("jpaged.loading.build_context._product_impl", lambda mesh, impl: "xla")
    assert error < 1.3 * error_of(logits_of(load_model(tmp_path, dtype="bfloat16", stacked=True)), want) < 0.3


def error_of(found, want):
    """Return the share of a typical token's error: rounding makes a few tokens choose another expert."""
    return np.median(np.sqrt(np.mean((found - want) ** 2, axis=1))) / np.std(want)


def test_a_saved_model_is_loaded_with_and_without_padding(tmp_path, monkeypatch):
    make_checkpoint("gpt_oss", tmp_path / "source", **ONE_OF_EACH)
    plain = load_model(tmp_path / "source", dtype="float32")
    save_checkpoint(tmp_path / "plain", plain)
    with monkeypatch.context() as on_a_tpu:
        on_a_tpu.setattr("jpaged.loading.build_context._product_impl", lambda mesh, impl: "tpu_interpret")
        padded = load_model(tmp_path / "plain", dtype="float32")
        save_checkpoint(tmp_path / "padded", padded)
        again = load_model(tmp_path / "padded", dtype="float32")
    assert experts_of(padded) != experts_of(plain)
    for found, want in ((again, padded), (load_model(tmp_path / "padded", dtype="float32"), plain)):
        assert experts_of(found) == experts_of(want)
        for one, other in zip(jax.tree.leaves(found.params), jax.tree.leaves(want.params), strict=True):
            np.testing.assert_array_equal(jnp.asarray(one), jnp.asarray(other))

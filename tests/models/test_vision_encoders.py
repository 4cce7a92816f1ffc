"""The vision encoders and projectors compute what transformers computes, in every layout."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
)

from jpaged.images import anyres
from jpaged.model_api import BuildContext
from jpaged_models.vision import (
    Gemma3Projector,
    LlavaOnevisionProjector,
    MllamaProjector,
    MllamaVision,
    SiglipVision,
)

SIGLIP = {
    "hidden_size": 60,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "image_size": 30,
    "patch_size": 7,
    "vision_use_head": False,
}
TEXT = {
    "vocab_size": 97,
    "hidden_size": 42,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GRIDS = [[30, 30], [30, 60], [60, 30], [60, 60], [90, 30], [90, 90]]


def gemma3():
    text = {**TEXT, "head_dim": 16}
    return Gemma3ForConditionalGeneration, Gemma3Config(
        text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=5
    )


def llava(bias=True):
    config = LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**SIGLIP, "model_type": "siglip_vision_model"},
        image_grid_pinpoints=GRIDS,
        image_token_index=5,
        video_token_index=6,
        vision_aspect_ratio="anyres_max_2",
        multimodal_projector_bias=bias,
    )
    return LlavaOnevisionForConditionalGeneration, config


def mllama():
    vision = {
        "hidden_size": 60,
        "attention_heads": 5,
        "intermediate_size": 37,
        "num_hidden_layers": 4,
        "num_global_layers": 2,
        "vision_output_dim": 180,
        "image_size": 30,
        "patch_size": 7,
        "max_num_tiles": 3,
        "intermediate_layers_indices": [0, 2],
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [2, 1], [3, 1]],
    }
    text = {**TEXT, "num_hidden_layers": 2, "cross_attention_layers": [1]}
    return MllamaForConditionalGeneration, MllamaConfig(vision_config=vision, text_config=text, image_token_index=5)


def checkpoint(kind, config, path):
    """Save a random model, norms, biases and gates too; return it and the saved tensors."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            flat = weight.ndim < 2 or weight.shape[0] == 1
            weight.normal_(0.3 if flat else 0.0, 0.3 if flat else weight[0].numel() ** -0.5)
    model.save_pretrained(path)
    return model, load_file(path / "model.safetensors")


def build_context(**options):
    return BuildContext(dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0), **options)


def filled(make, sources, tensors, **options):
    """Build the module `make` describes with the parameters that ``sources(module)`` names; none is left out."""
    module = nnx.eval_shape(lambda: make(build_context(**options)))
    graph, state = nnx.split(module)
    flat = dict(nnx.to_flat_state(state))
    left = set(flat)
    for source in sources(module):
        value = np.asarray(source.convert(*(tensors[name] for name in source.sources)))
        assert value.shape == flat[source.path].shape, (source.path, value.shape)
        assert len(source.partition) == value.ndim, source.path
        left.remove(source.path)
        flat[source.path] = flat[source.path].replace(jnp.asarray(value))
    assert not left
    return nnx.merge(graph, nnx.from_flat_state(flat))


def run(module, *arrays, method=None):
    """Call the module, or its method, jitted."""
    graph, params = nnx.split(module)
    name = method or "__call__"
    return np.asarray(jax.jit(lambda params, *a: getattr(nnx.merge(graph, params), name)(*a))(params, *arrays))


def pixels(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def close(ours, theirs, atol=1e-4):
    theirs = theirs.detach().numpy()
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.05, "the test model's features should differ"
    np.testing.assert_allclose(ours, theirs, atol=atol, rtol=0)


def before(tensors, part):
    """Return what stands before `part` in the name of a tensor: the prefix of the module that holds it."""
    (found,) = {name.removesuffix("." + part) for name in tensors if name.endswith("." + part)}
    return found


@pytest.mark.parametrize("shards", [1, 4])
def test_gemma3s_features_equal_transformers(shards, tmp_path):
    kind, config = gemma3()
    model, tensors = checkpoint(kind, config, tmp_path)
    images = pixels(3, 3, 30, 30)
    with torch.no_grad():
        theirs = model.model.get_image_features(torch.tensor(images)).pooler_output
    tower, projector = (
        before(tensors, "embeddings.patch_embedding.weight"),
        before(tensors, "mm_input_projection_weight"),
    )
    vision = filled(
        lambda build: SiglipVision(config.vision_config, build, final_norm=True),
        lambda module: module.weights((), tower),
        tensors,
        tensor_parallel=shards,
    )
    project = filled(partial(Gemma3Projector, config), lambda module: module.weights((), projector), tensors)
    close(run(project, run(vision, images)), theirs)


@pytest.mark.parametrize(("shards", "bias"), [(1, True), (4, False)])
def test_llava_onevisions_tokens_equal_transformers(shards, bias, tmp_path):
    kind, config = llava(bias)
    model, tensors = checkpoint(kind, config, tmp_path)
    shape = anyres.Anyres(tuple(map(tuple, GRIDS)), 30, 4, 2)
    tower, projector = before(tensors, "embeddings.patch_embedding.weight"), before(tensors, "linear_1.weight")
    newline = next(name for name in tensors if name.endswith("image_newline"))
    vision = filled(
        lambda build: SiglipVision(config.vision_config, build, final_norm=False),
        lambda module: module.weights((), tower),
        {name: tensor for name, tensor in tensors.items() if "post_layernorm" not in name},
        tensor_parallel=shards,
    )
    project = filled(
        partial(LlavaOnevisionProjector, config),
        lambda module: module.weights((), projector, newline),
        tensors,
        tensor_parallel=shards,
    )
    tiles = pixels(10, 3, 30, 30)
    projected = run(project, run(vision, tiles))
    for size, alone in (((31, 47), True), ((200, 170), True), ((9, 100), True), ((31, 47), False)):
        rows, weights = anyres.packing(size, shape, alone=alone)
        given = torch.tensor(tiles)[None] if alone else torch.tensor(tiles[:2])[:, None]
        with torch.no_grad():
            theirs = model.model.get_image_features(
                given,
                image_sizes=torch.tensor([size] * len(given)),
                vision_aspect_ratio="anyres_max_2",
                batch_num_images=None if alone else torch.tensor([2]),
            )
        close(run(project, projected, rows, weights, method="pack"), theirs.pooler_output[0])


@pytest.mark.parametrize("shards", [1, 4])
def test_mllamas_features_equal_transformers(shards, tmp_path):
    kind, config = mllama()
    model, tensors = checkpoint(kind, config, tmp_path)
    images = pixels(3, 3, 3, 30, 30)
    ids, mask = np.array([1, 3, 4]), np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    images[mask == 0] = 0
    with torch.no_grad():
        given = [torch.tensor(array)[:, None] for array in (images, ids, mask)]
        theirs = model.model.vision_model(*given).last_hidden_state[:, 0]
        projected = model.model.multi_modal_projector(theirs)
    tower, projector = before(tensors, "class_embedding"), "multi_modal_projector"
    vision = filled(
        partial(MllamaVision, config.vision_config),
        lambda module: module.weights((), tower),
        tensors,
        tensor_parallel=shards,
    )
    ours = run(vision, images, ids, mask)
    close(ours, theirs)
    project = filled(partial(MllamaProjector, config), lambda module: module.weights((), projector), tensors)
    close(run(project, ours), projected)


@pytest.fixture(scope="module")
def tiled():
    """A random encoder of tiles, two images for it, and their features."""
    vision = MllamaVision(mllama()[1].vision_config, build_context())
    given = pixels(2, 3, 3, 30, 30), np.array([2, 5]), np.array([[1, 1, 0], [1, 1, 1]])
    return vision, given, run(vision, *given)


def test_an_image_is_encoded_alone_as_in_a_batch(tiled):
    vision, given, both = tiled
    np.testing.assert_allclose(run(vision, *(array[1:] for array in given))[0], both[1], atol=1e-5)


@pytest.mark.parametrize("at_once", [7, pytest.param(24, marks=pytest.mark.nightly)])
def test_tokens_that_attend_in_turn_get_what_they_get_together(at_once, tiled, monkeypatch):
    vision, given, together = tiled
    monkeypatch.setattr("jpaged_models.vision.encoder.QUERIES_AT_ONCE", at_once)
    np.testing.assert_allclose(run(vision, *given), together, atol=1e-5)


def test_bfloat16_stays_close():
    _, config = gemma3()
    tower = SiglipVision(config.vision_config, build_context(), final_norm=True)
    graph, params = nnx.split(tower)
    halved = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    exact, rounded = run(tower, pixels(1, 3, 30, 30)), run(halved, pixels(1, 3, 30, 30))
    assert rounded.dtype == jnp.bfloat16
    assert np.abs(exact - rounded.astype(np.float32)).mean() < 0.05


def test_pixels_of_another_size_are_refused(tiled):
    with pytest.raises(ValueError, match=r"pixels.shape=.*, the encoder takes \[images, \(3, 3, 30, 30\)\]"):
        tiled[0](pixels(1, 3, 3, 31, 30), np.array([1]), np.ones((1, 3)))
    tower = nnx.eval_shape(lambda: SiglipVision(gemma3()[1].vision_config, build_context(), final_norm=True))
    with pytest.raises(ValueError, match=r"pixels.shape=.*, the encoder takes \[images, \(3, 30, 30\)\]"):
        tower(pixels(1, 3, 30, 31))


@pytest.mark.parametrize(
    ("field", "value", "projector"),
    [("mm_tokens_per_image", 5, Gemma3Projector), ("vision_feature_layer", -2, LlavaOnevisionProjector)],
)
def test_what_projectors_do_not_do_is_refused(field, value, projector):
    config = gemma3()[1] if projector is Gemma3Projector else llava()[1]
    setattr(config, field, value)
    with pytest.raises(ValueError, match=f"{field}={value}"):
        projector(config, build_context())


@pytest.mark.nightly
def test_only_all_reduces_cross_devices():
    """Sharded as `weights()` says, two for each of the three layers and one for the projector."""
    script = Path(__file__).with_name("sharded_vision.py")
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(script)], env=os.environ | devices, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["collectives"] == {"all-reduce": 7}
    assert result["error"] < 1e-5

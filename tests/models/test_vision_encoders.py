"""The vision encoders and projectors compute what transformers computes, in every layout."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from mllama_reference import taking_what_enters
from on_devices import printed_on_devices
from safetensors.numpy import load_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
)

from jpaged.execution.image_rows import ImageRows, Item
from jpaged.images import anyres
from jpaged.images.tiles import TilePatches, taken
from jpaged.model_api import BuildContext
from jpaged_models import encoder
from jpaged_models.attention import plainly
from jpaged_models.decoder import Decoder
from jpaged_models.dense import MLPSpec
from jpaged_models.encoder import EncoderSpec
from jpaged_models.stack import LayerKind, Shared
from jpaged_models.vision import MllamaProjector, MllamaVision
from jpaged_models.vision.gemma3 import GEMMA3, Gemma3Vision
from jpaged_models.vision.llava import LLAVA, LLAVA_ONEVISION, LlavaVision
from jpaged_models.vision.tower import axial, layers_of

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
        path, index = module.locate(source) if hasattr(module, "locate") else (source.path, None)
        assert index is None, "layers are not stacked"
        assert value.shape == flat[path].shape, (path, value.shape)
        assert len(source.partition) == value.ndim, path
        left.remove(path)
        flat[path] = flat[path].replace(jnp.asarray(value))
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


SETTINGS = {"do_rescale": True, "rescale_factor": 1 / 99, "do_normalize": True, "image_mean": 0.4, "image_std": 0.7}


def images(*shape):
    """Random bytes, and the pixels that they stand for."""
    bytes_ = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    return bytes_, torch.tensor((bytes_ / 99 - 0.4) / 0.7, dtype=torch.float32)


def within(row):
    """Return attention within the tiles of a row."""

    def attend(segments, q, k, v, *, scale):
        seen = jnp.searchsorted(row[segments], jnp.arange(len(q)), side="right")
        scores = jnp.einsum("qhgd,khd->hgqk", q, k, precision="highest") * scale
        share = jax.nn.softmax(jnp.where(seen[:, None] == seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hgqk,khd->qhgd", share, v, precision="highest")

    return attend


def towers(family, kind, config, tensors, items, **options):
    """Return the features that the family's tower makes of items' arrays, packed into one row."""
    named = {}
    for name, tensor in tensors.items():
        prefix = next((pair for pair in family.prefixes if name.startswith(pair[0])), None)
        named |= {} if prefix is None else {prefix[1] + name.removeprefix(prefix[0]): tensor}
    tower = filled(partial(kind, config), lambda module: module.weights(), named, **options)
    counts = [
        len(arrays["takes"]) if "takes" in arrays else len(arrays["places"]) // tower.layout.merge for arrays in items
    ]
    rows = ImageRows(tower.layout, sum(len(arrays["places"]) for arrays in items))
    packed = [Item(arrays, np.zeros(count, np.int32)) for arrays, count in zip(items, counts, strict=True)]
    (made,) = rows.joined([packed], lambda number: np.zeros(number, np.int32))
    row = {name: array[0] for name, array in made.arrays.items()}
    graph, params = nnx.split(tower)
    found = jax.jit(lambda params, row: nnx.merge(graph, params)(row, within(row)))(params, row)
    return np.split(np.asarray(found)[: sum(counts)], np.cumsum(counts)[:-1])


@pytest.mark.parametrize("shards", [1, 4])
def test_gemma3s_features_equal_transformers(shards, tmp_path):
    kind, config = gemma3()
    model, tensors = checkpoint(kind, config, tmp_path)
    tiles, given = images(3, 3, 30, 30)
    with torch.no_grad():
        theirs = model.model.get_image_features(given).pooler_output
    patches = TilePatches(config.vision_config, SETTINGS, merge=2)
    items = [patches.arrays(tile[None]) for tile in tiles]
    ours = towers(GEMMA3, Gemma3Vision, config, tensors, items, tensor_parallel=shards)
    close(np.stack(ours), theirs)


@pytest.mark.parametrize(("shards", "bias"), [(1, True), (4, False)])
def test_llava_onevisions_tokens_equal_transformers(shards, bias, tmp_path):
    kind, config = llava(bias)
    model, tensors = checkpoint(kind, config, tmp_path)
    shape = anyres.Anyres(tuple(map(tuple, GRIDS)), 30, 4, 2)
    patches = TilePatches(config.vision_config, SETTINGS)
    tiles, given = images(10, 3, 30, 30)
    items, wanted = [], []
    for size, alone in (((31, 47), True), ((200, 170), True), ((9, 100), True), ((31, 47), False)):
        height, width = anyres.best_resolution(size, shape.resolutions)
        mine = slice(0, 1 + height // 30 * (width // 30) if alone else 1)
        items.append(patches.arrays(tiles[mine]) | taken(patches, *anyres.packing(size, shape, alone=alone)))
        with torch.no_grad():
            theirs = model.model.get_image_features(
                given[None] if alone else given[:2, None],
                image_sizes=torch.tensor([size] * (1 if alone else 2)),
                vision_aspect_ratio="anyres_max_2",
                batch_num_images=None if alone else torch.tensor([2]),
            )
        wanted.append(theirs.pooler_output[0])
    for found, theirs in zip(
        towers(LLAVA_ONEVISION, LlavaVision, config, tensors, items, tensor_parallel=shards), wanted, strict=True
    ):
        close(found, theirs)


@pytest.mark.parametrize("shards", [1, 4])
def test_mllamas_features_equal_transformers(shards, tmp_path):
    kind, config = mllama()
    model, tensors = checkpoint(kind, config, tmp_path)
    taking_what_enters(model)
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


@pytest.mark.parametrize("norm_before", [True, False])
def test_layers_take_many_rows_in_turn_in_less_memory_and_make_what_they_make_together(norm_before, monkeypatch):
    """The last turn has fewer rows, of which some are padding."""
    rows, live, rotary = 1000, jnp.int32(990), axial(12, 100.0)
    mlp = MLPSpec(400, "gelu", bias=True, gated=norm_before, names=("gate", "up", "down")[not norm_before :])
    spec = EncoderSpec(
        24, 2, mlp, 1e-6, (LayerKind("tiles"),) * 2, norm_before=norm_before, rotary=(("tiles", rotary),)
    )
    places = jnp.asarray(np.random.default_rng(0).integers(0, 30, (rows, 2)))

    def made(at_once):
        monkeypatch.setattr(encoder, "ROWS_AT_ONCE", at_once)
        graph, params = nnx.split(layers_of(spec, build_context()))

        def run(params, x):
            shared = Shared({"tiles": rotary.tables(places)}, live)
            attend = plainly(lambda cache, group, q, k, v, scale: (cache, q * k[:, :, None] + v[:, :, None]))
            return nnx.merge(graph, params)(x, shared, None, attend)[0]

        compiled = jax.jit(run).lower(params, pixels(rows, 24)).compile()
        return np.asarray(compiled(params, pixels(rows, 24)))[:live], compiled.memory_analysis().temp_size_in_bytes

    (together, much), (in_turn, little) = made(rows), made(64)
    np.testing.assert_allclose(in_turn, together, atol=1e-5)
    assert little < 0.6 * much


def test_pixels_of_another_size_are_refused(tiled):
    with pytest.raises(ValueError, match=r"pixels.shape=.*, the encoder takes \[images, \(3, 3, 30, 30\)\]"):
        tiled[0](pixels(1, 3, 3, 31, 30), np.array([1]), np.ones((1, 3)))


@pytest.mark.parametrize(
    ("make", "kind", "field", "value", "message"),
    [
        (gemma3, Gemma3Vision, "mm_tokens_per_image", 5, "mm_tokens_per_image=5 is not a square"),
        (llava, LlavaVision, "vision_feature_layer", -5, r"vision_feature_layer=\[-5\] are not states"),
        (llava, LlavaVision, "vision_feature_layer", [1, 4], r"vision_feature_layer=\[1, 4\] are not states"),
    ],
)
def test_what_towers_do_not_do_is_refused(make, kind, field, value, message):
    _, config = make()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=message):
        kind(config, build_context())


def test_a_tower_of_a_kind_that_a_family_has_not_is_refused():
    _, config = llava()
    config.vision_config.model_type = "siglip2_vision_model"
    with pytest.raises(ValueError, match=r"model_type='siglip2_vision_model' is not one of siglip.*, clip.*, pixtral"):
        LLAVA.around(Decoder, config)


@pytest.mark.nightly
def test_only_all_reduces_cross_devices():
    """Sharded as `weights()` says, two for each of the three layers and one for the projector."""
    result = printed_on_devices(4, Path(__file__).with_name("sharded_vision.py"))
    assert result["collectives"] == {"all-reduce": 7}
    assert result["error"] < 1e-5

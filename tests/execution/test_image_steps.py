"""Encoding an image, and a step with images, update the pool in place; features come back from it as they went in."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from qwen_vl_checkpoints import qwen3_vl
from vision_checkpoints import gemma3_config, mllama_config

from jpaged.execution import Bucket, make_mesh, make_step
from jpaged.execution.batch import empty_batch
from jpaged.execution.caches.base import BlockSettings
from jpaged.execution.caches.images import ImageBatch, ImageCache
from jpaged.execution.caches.pool import PoolSpec, plan_pool
from jpaged.execution.encode import between_parts, calls, make_encode, make_encode_part, no_rows
from jpaged.execution.image_rows import Item, image_examples, image_rows
from jpaged.model_api import BuildContext, ImageGroup
from jpaged_models.families import Family
from jpaged_models.gemma import Gemma
from jpaged_models.mllama import Mllama
from jpaged_models.vision.gemma3 import GEMMA3
from jpaged_models.vision.qwen import QWEN3_VL

MESH = make_mesh(1)


def qwen3_vl_config():
    config = qwen3_vl()[1]
    config.text_config.tie_word_embeddings = False  # as the file of a checkpoint says
    return config


@pytest.fixture(
    scope="module",
    params=[
        (GEMMA3.around(Gemma), gemma3_config),
        (Mllama, mllama_config),
        (QWEN3_VL.around(Family), qwen3_vl_config),
    ],
    ids=["Gemma 3", "mllama", "Qwen3-VL"],
)
def model(request):
    """(graph definition, parameters' shapes, a pool of 64 MiB, the model)."""
    family, config = request.param

    def make():
        return family(config(), BuildContext(dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)))

    model = nnx.eval_shape(make)
    graphdef, params = nnx.split(model)
    spec = plan_pool(model.layer_groups, block_size=16, dtype=jnp.float32, shards=1, pool_bytes=65 << 20)
    return graphdef, params, spec, model


def assert_in_place(compiled, spec):
    memory = compiled.memory_analysis()
    assert spec.device_bytes > 64 << 20 and memory.alias_size_in_bytes >= spec.device_bytes
    assert memory.temp_size_in_bytes < 0.05 * spec.device_bytes


def test_a_step_with_images_never_copies_the_pool(model):
    graphdef, params, spec, _ = model
    pool, last = jax.ShapeDtypeStruct(spec.shape, spec.dtype), jax.ShapeDtypeStruct((8,), jnp.int32)
    batch = empty_batch(Bucket(64, 8, False, images=True), spec, max_num_seqs=8, max_model_len=256)
    step = make_step(graphdef, spec, MESH)
    assert_in_place(step.lower(params, pool, batch, last, decode_only=False).compile(), spec)


def test_the_encoder_never_copies_the_pool(model):
    graphdef, params, spec, module = model
    pool = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    packer = image_rows(module, None, max_model_len=256, budget=64)
    arrays, count = image_examples(module, packer)[0]
    if packer is None:
        ((arrays, rows),) = next(calls([[(arrays, no_rows(spec, count))]], (1,)))
    else:
        ((arrays, rows),) = packer.joined([[Item(arrays, no_rows(spec, count)[:count])]], partial(no_rows, spec))
    assert_in_place(make_encode(graphdef, spec, MESH).lower(params, pool, arrays, rows).compile(), spec)


def test_a_part_of_the_encoder_never_copies_the_pool_nor_what_is_kept_between_parts(model):
    graphdef, params, spec, module = model
    pool = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    packer = image_rows(module, None, max_model_len=256, budget=64)
    if packer is None:
        pytest.skip("Llama 3.2 Vision encodes an image as a whole")
    assert module.image_group.rounds, "its encoder can stop between layers"
    arrays, count = image_examples(module, packer)[0]
    ((arrays, rows),) = packer.joined([[Item(arrays, no_rows(spec, count)[:count])]], partial(no_rows, spec))
    state, part = between_parts(graphdef, params, MESH, arrays), np.zeros(2, np.int32)
    made = make_encode_part(graphdef, spec, MESH).lower(params, pool, state, arrays, rows, part).compile()
    assert_in_place(made, spec)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert made.memory_analysis().alias_size_in_bytes >= spec.device_bytes + kept


@pytest.mark.parametrize("width", [130, 896, 1280])
@pytest.mark.parametrize(("pool_dtype", "dtype"), [("float32", "float32"), ("int8", "bfloat16")])
def test_features_are_kept_to_the_bit_whatever_the_pool_holds(pool_dtype, dtype, width):
    """Two blocks of 8 features, in a pool of another dtype: some are read and written in parts."""
    form = BlockSettings(8, jnp.dtype(pool_dtype), 1)
    cache = ImageCache(ImageGroup("images", (), width, dtype), form)
    spec = PoolSpec.plan([cache], 5 * cache.pool_groups()[0].real_bytes)
    pool = jnp.zeros(spec.shape, form.dtype)
    features = jax.random.normal(jax.random.key(0), (11, width)).astype(dtype)
    rows = np.array([*range(24, 32), 8, 9, 2**31 - 1], np.int32)  # the last one is padding
    pool = cache.write(MESH, spec.views[0], pool, features, rows)

    class Call:
        mesh, views = MESH, spec.views
        arrays = ImageBatch(np.array([24, -1, 9, 31, 0], np.int32))

    hidden = jnp.ones((5, width), dtype)
    _, taken = cache.operate(Call, pool, 0, hidden)
    expected = [features[0], hidden[1], features[9], features[7], jnp.zeros(width, dtype)]
    np.testing.assert_array_equal(np.asarray(taken, np.float32), np.asarray(jnp.stack(expected), np.float32))
    Call.arrays = ImageBatch()
    assert cache.operate(Call, pool, 0, hidden)[1] is hidden

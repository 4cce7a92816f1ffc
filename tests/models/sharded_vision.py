"""Run on a process of 4 devices: prints as JSON what SigLIP and LLaVA-OneVision's projector do when partitioned.

``collectives`` counts the collective operations of the compiled program; ``error`` is the largest difference
of its features from those of one device.
"""

import json
import re
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jpaged.model_api import TENSOR_AXIS, BuildContext
from jpaged_models.vision.llava import LlavaVision

VISION = SimpleNamespace(
    model_type="siglip_vision_model",
    num_channels=3,
    image_size=30,
    patch_size=7,
    hidden_size=60,
    intermediate_size=37,
    num_hidden_layers=3,
    num_attention_heads=5,
    layer_norm_eps=1e-6,
    hidden_act="gelu_pytorch_tanh",
)
CONFIG = SimpleNamespace(
    vision_config=VISION,
    text_config=SimpleNamespace(hidden_size=42),
    vision_feature_layer=-1,
    multimodal_projector_bias=True,
    projector_hidden_act="gelu",
)


def within(row):
    """Return attention of all patches to each other, head by head as the engine's is."""

    def attend(segments, q, k, v, *, scale):
        share = jax.nn.softmax(jnp.einsum("qhgd,khd->hgqk", q, k) * scale, axis=-1)
        return jnp.einsum("hgqk,khd->qhgd", share, v)

    return attend


def main() -> dict:
    mesh = Mesh(np.array(jax.devices()), (TENSOR_AXIS,))
    model = LlavaVision(CONFIG, BuildContext(dtype=jnp.dtype(jnp.float32), tensor_parallel=mesh.size, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    sources = {model.locate(source)[0]: source for source in model.weights()}
    assert set(sources) == set(flat)
    for path, source in sources.items():
        spread = jax.device_put(flat[path][...], NamedSharding(mesh, source.partition))
        flat[path] = flat[path].replace(spread)

    def forward(params, pixels):
        row = {
            "pixels": pixels,
            "places": jnp.arange(16),
            "tiles": jnp.array([0, 16]),
            "scale": jnp.ones(3),
            "shift": jnp.zeros(3),
            "takes": jnp.arange(16)[:, None],
            "shares": jnp.ones((16, 1)),
        }
        return nnx.merge(graph, params)(row, within(row))

    pixels = np.random.default_rng(0).normal(size=(16, 147)).astype(np.float32)
    params = nnx.from_flat_state(flat)
    compiled = jax.jit(forward).lower(params, pixels).compile()
    names = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    error = np.abs(np.asarray(compiled(params, pixels)) - np.asarray(jax.jit(forward)(state, pixels))).max()
    return {"collectives": Counter(re.findall(names, compiled.as_text())), "error": float(error)}


if __name__ == "__main__":
    print(json.dumps(main()))

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
from jpaged_models.vision import LlavaOnevisionProjector, SiglipVision

VISION = SimpleNamespace(
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


class Encoder(nnx.Module):
    """Pixels to projected features."""

    def __init__(self, build: BuildContext):
        self.tower = SiglipVision(VISION, build, final_norm=False)
        self.projector = LlavaOnevisionProjector(CONFIG, build)

    def __call__(self, pixels):
        return self.projector(self.tower(pixels))


def main() -> dict:
    mesh = Mesh(np.array(jax.devices()), (TENSOR_AXIS,))
    model = Encoder(BuildContext(dtype=jnp.dtype(jnp.float32), tensor_parallel=mesh.size, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    sources = [*model.tower.weights(("tower",), "t"), *model.projector.weights(("projector",), "p", "n")]
    assert {source.path for source in sources} == set(flat)
    for source in sources:
        spread = jax.device_put(flat[source.path][...], NamedSharding(mesh, source.partition))
        flat[source.path] = flat[source.path].replace(spread)

    def forward(params, pixels):
        return nnx.merge(graph, params)(pixels)

    pixels = np.random.default_rng(0).normal(size=(2, 3, 30, 30)).astype(np.float32)
    params = nnx.from_flat_state(flat)
    compiled = jax.jit(forward).lower(params, pixels).compile()
    names = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    error = np.abs(np.asarray(compiled(params, pixels)) - np.asarray(jax.jit(forward)(state, pixels))).max()
    return {"collectives": Counter(re.findall(names, compiled.as_text())), "error": float(error)}


if __name__ == "__main__":
    print(json.dumps(main()))

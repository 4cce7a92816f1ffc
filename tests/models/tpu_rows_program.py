"""Run on a process of some devices: prints as JSON how far a model with a TPU's kernels of rows, which Pallas
interprets, is from one without, and which of them it calls; for a Llama, for a Qwen3, whose heads are normed, and for a
Gemma 3, which has norms behind its blocks too."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from dense_model import dense_attend, empty_cache, family
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from jpaged.model_api import TENSOR_AXIS, BuildContext

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}


def main() -> dict:
    configs = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma3_text": Gemma3TextConfig}
    return {name: compared(name, config(**SIZES)) for name, config in configs.items()}


def compared(name: str, config: PretrainedConfig) -> dict:
    """Return what a family's model calls, and how far it is from the one without."""
    mesh = Mesh(np.array(jax.devices()), (TENSOR_AXIS,))
    tokens, outputs = np.arange(3, 19), {}
    for impl in ("xla", "tpu_interpret"):
        build = BuildContext(
            dtype=np.dtype(np.float32),
            tensor_parallel=mesh.size,
            stacked=True,
            product_impl=impl,
            rngs=nnx.Rngs(0),
        )
        graph, params = nnx.split(family(name)(config, build))
        params = jax.tree.map(varied, params)
        params = jax.device_put(params, NamedSharding(mesh, P()))

        def forward(params, tokens, graph=graph):
            model = nnx.merge(graph, params)
            positions = jnp.arange(tokens.shape[0])
            attend = dense_attend(model.layer_groups, positions, mesh.size)
            return model.logits(model(tokens, positions, empty_cache(model, len(tokens), jnp.float32), attend)[0])

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            outputs[impl] = np.asarray(jax.jit(forward)(params, tokens))
            called = re.findall(
                r"name=(add_rms_norm|rms_norm|normed_rotated_heads|rotated_heads)\b",
                str(jax.make_jaxpr(forward)(params, tokens)),
            )
    return {"kernels": called, "error": float(np.abs(outputs["xla"] - outputs["tpu_interpret"]).max())}


def varied(leaf: jax.Array) -> jax.Array:
    """Scales of norms begin as ones, which says little of where they are taken, and of which layer."""
    return leaf * (1 + 0.3 * jnp.cos(jnp.arange(leaf.size))).reshape(leaf.shape)


if __name__ == "__main__":
    print(json.dumps(main()))

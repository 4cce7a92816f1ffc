"""Run with a checkpoint's path on a process of 4 devices: prints as JSON what the partitioned model does.

``collectives`` counts the collective operations of the compiled program; ``error`` is the largest difference
of its logits from those of one device.
"""

import json
import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from dense_model import dense_attend, empty_cache, load, run_dense
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jpaged.model_api import TENSOR_AXIS


def main(path: str, stacked: bool) -> dict:
    mesh = Mesh(np.array(jax.devices()), (TENSOR_AXIS,))
    model = load(path, tensor_parallel=mesh.size, stacked=stacked)
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    for source in model.weights():
        key, index = model.locate(source)
        partition = source.partition if index is None else P(None, *source.partition)
        flat[key] = flat[key].replace(jax.device_put(flat[key][...], NamedSharding(mesh, partition)))
    params = nnx.from_flat_state(flat)

    def forward(params, tokens):
        model = nnx.merge(graph, params)
        positions = jnp.arange(tokens.shape[0])
        attend = dense_attend(model.layer_groups, positions, mesh.size)
        cache = empty_cache(model, len(tokens), jnp.float32, mesh.size)
        return model.logits(model(tokens, positions, cache, attend)[0])

    tokens = np.arange(3, 20)
    by_vocab = NamedSharding(mesh, P(None, TENSOR_AXIS))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(forward, out_shardings=by_vocab).lower(params, tokens).compile()
    names = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    error = np.abs(np.asarray(compiled(params, tokens)) - run_dense(model, tokens))[:, : model.vocab_size].max()
    return {"collectives": Counter(re.findall(names, compiled.as_text())), "error": float(error)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], stacked=sys.argv[2] == "stacked")))

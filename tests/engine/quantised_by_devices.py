"""Prints as JSON how far sharded quantised models are from their own values, and from one device's.

Run with a checkpoint's folder and forms such as "int8 on 2", on a process of 8 devices. XLA multiplies on one device
too: a CPU's own products round activations.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from dense_model import run_dense
from flax import nnx

from jpaged.loading import build_context, load_model
from pallas_kernels.quantised import QuantisedMatrix

build_context._product_impl = lambda mesh, impl: "xla"
TOKENS = np.random.default_rng(0).integers(3, 211, 20)


def is_quantised(leaf):
    return isinstance(leaf, QuantisedMatrix)


def values(leaf):
    """On one device, so that nothing of the sharding is left."""
    return jnp.asarray(np.asarray(leaf.dequantised(jnp.float32) if is_quantised(leaf) else leaf))


def logits(folder: str, size: int, quantization: str, *, as_values: bool) -> np.ndarray:
    loaded = load_model(folder, dtype="float32", quantization=quantization, tensor_parallel_size=size, stacked=True)
    params = loaded.params
    if as_values:
        params = jax.tree.map(values, params, is_leaf=is_quantised)
    return run_dense(nnx.merge(loaded.graphdef, params), TOKENS)[:, : loaded.model.vocab_size]


def main(folder: str, *forms: str) -> dict[str, list[float]]:
    """By quantisation and size: distance from the values, and from one device."""
    found = {}
    for form in forms:
        quantization, size = form.split(" on ")
        alone = logits(folder, 1, quantization, as_values=False)
        sharded = logits(folder, int(size), quantization, as_values=False)
        own = logits(folder, int(size), quantization, as_values=True)
        found[form] = [float(np.abs(sharded - other).max()) for other in (own, alone)]
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

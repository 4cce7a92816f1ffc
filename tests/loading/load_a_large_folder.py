"""Run by test_loading_memory: loads a folder of shards and prints what memory it took, as JSON.

Memory is the growth of this process's peak, measured from after a first, tiny load (imports, compilation).
"""

import json
import resource
import sys
import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from toy_family import Toy, toy_config, toy_tensors, write_safetensors

from jpaged.loading.build_context import build_context
from jpaged.loading.parameters.weights import load_params
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.model_api import TENSOR_AXIS

small, large, layers, size, stacked = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]


class Counting(SafetensorsWeights):
    """Notes how many of the tensors it handed out are alive at once."""

    def __init__(self, folder):
        super().__init__(folder)
        self.alive, self.most, self.lock = 0, 0, threading.Lock()

    def read(self, name):
        tensor = super().read(name).view(Tracked)
        with self.lock:
            self.alive += 1
            self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self.gone)
        return tensor

    def gone(self):
        with self.lock:
            self.alive -= 1


class Tracked(np.ndarray):
    """An array that can be referred to weakly, as its views and copies can."""


def load(folder, config):
    mesh = Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
    reader = Counting(folder)
    build = build_context(mesh, jnp.float32, stacked=stacked == "stacked")
    _, _, params = load_params(Toy, config, reader, build, mesh=mesh)
    return jax.block_until_ready(params), reader


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


warm = toy_config(layers=2)
load(write_safetensors(Path(small), toy_tensors(warm)), warm)
before = peak()
params, reader = load(large, toy_config(layers=layers, size=size))
total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(json.dumps({"grown": peak() - before, "parameters": total, "alive": reader.most}))

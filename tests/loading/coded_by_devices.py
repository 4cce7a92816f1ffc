"""Run with two folders, of codes and of their values, on a process of 8 devices: prints as JSON how far logits of the
codes on 2 and 4 shards are from those of the values on one device, by size."""

import json
import sys

import numpy as np
from dense_model import run_dense
from flax import nnx

from jpaged.loading import load_model

TOKENS = np.random.default_rng(0).integers(3, 96, 20)


def logits(folder, size, stacked):
    loaded = load_model(folder, dtype="float32", tensor_parallel_size=size, stacked=stacked)
    return run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)[:, : loaded.model.vocab_size]


if __name__ == "__main__":
    want = logits(sys.argv[2], 1, False)
    found = {size: float(np.abs(logits(sys.argv[1], size, True) - want).max()) for size in (2, 4)}
    print(json.dumps(found | {"largest": float(np.abs(want).max())}))

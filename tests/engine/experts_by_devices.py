"""Run with a checkpoint's folder and names in `ENGINES` on a process of 8 devices: prints as JSON what engines with
whole experts on each device generate, and which experts each device holds.

XLA multiplies on one device too: a CPU's own products round activations.
"""

from __future__ import annotations

import json
import sys

import jax
from tokens_by_devices import PARAMS, PROMPTS, SETTINGS

from jpaged import LLM
from jpaged.loading import build_context

build_context._product_impl = lambda mesh, impl: "xla"
ENGINES = {
    "2": {"tensor_parallel_size": 2},
    "2 replicas of 4": {"tensor_parallel_size": 4, "data_parallel_size": 2},
    "8": {"tensor_parallel_size": 8},
    "int8 on 1": {"quantization": "int8"},
    "int8 on 4": {"quantization": "int8", "tensor_parallel_size": 4},
}
"""By their devices, or what their weights are held in too."""


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def experts_held(llm: LLM) -> list[list[int]]:
    """Return which experts each device holds of the first layer that has any."""
    tables = [leaf for leaf in jax.tree.leaves(llm.params) if leaf.ndim == 3]
    shards = sorted(tables[0].addressable_shards, key=lambda shard: shard.device.id)
    every = range(tables[0].shape[0])
    assert all(shard.data.shape[1:] == tables[0].shape[1:] for shard in shards)
    return [list(every[shard.index[0]]) for shard in shards]


def main(folder: str, *names: str) -> dict[str, dict]:
    found = {}
    for name in names:
        llm = LLM(folder, enable_expert_parallel=True, **SETTINGS | ENGINES[name])
        found[name] = {"tokens": tokens(llm), "experts": experts_held(llm)}
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

"""Run with a checkpoint's folder, the name of a load and tensor-parallel sizes on a process of 8 devices: prints the
tokens as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import greedy_reference
from greedy_reference import random_prompts

from jpaged import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
NUM_TOKENS = 16
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = random_prompts(lengths=(1, 9, 16, 30))
"""One prefill step takes them all, so that each size compiles two shapes only."""


class Load(NamedTuple):
    """What an engine is asked for, and the settings with which it serves all of it in one batch."""

    prompts: list[list[int]]
    params: SamplingParams
    settings: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return self.params.max_tokens


LOADS = {
    "few": Load(PROMPTS, PARAMS, SETTINGS),
    "all": Load(
        random_prompts(),
        greedy_reference.GREEDY,
        SETTINGS
        | {
            "max_model_len": max(greedy_reference.LENGTHS) + greedy_reference.NUM_TOKENS,
            "max_num_seqs": len(greedy_reference.LENGTHS),
            "max_num_batched_tokens": 512,
        },
    ),
}
"""A few short outputs, and the prompts and lengths by which one device is judged."""


def tokens_by_size(folder: str, load: Load, sizes: list[int]) -> dict[int, list[list[int]]]:
    """Greedy tokens of every prompt, by tensor_parallel_size."""
    found = {}
    for size in sizes:
        llm = LLM(folder, tensor_parallel_size=size, **load.settings)
        assert llm.control.engine.runner.spec.shards == size
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in load.prompts], load.params, use_tqdm=False)
        found[size] = [output.outputs[0].token_ids for output in outputs]
        llm.control.engine.memory.check_invariants()
        assert llm.control.engine.memory.num_used_blocks == 0
    return found


if __name__ == "__main__":
    print(json.dumps(tokens_by_size(sys.argv[1], LOADS[sys.argv[2]], [int(size) for size in sys.argv[3:]])))

"""Run with a checkpoint's folder and tensor-parallel sizes on a process of 8 devices: prints the tokens as JSON."""

import json
import sys

from greedy_reference import random_prompts

from jpaged import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
NUM_TOKENS = 16
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = random_prompts(lengths=(1, 9, 16, 30))
"""One prefill step takes them all, so that each size compiles two shapes only."""


def tokens_by_size(folder: str, sizes: list[int]) -> dict[int, list[list[int]]]:
    """Greedy tokens of every prompt, by tensor_parallel_size."""
    found = {}
    for size in sizes:
        llm = LLM(folder, tensor_parallel_size=size, **SETTINGS)
        assert llm._engine.runner.spec.shards == size
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
        found[size] = [output.outputs[0].token_ids for output in outputs]
        llm._engine.memory.check_invariants()
    return found


if __name__ == "__main__":
    print(json.dumps(tokens_by_size(sys.argv[1], [int(size) for size in sys.argv[2:]])))

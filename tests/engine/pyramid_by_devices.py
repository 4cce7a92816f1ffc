"""Run with a checkpoint's folder on a process of two devices: prints the tokens of two shards as JSON."""

import json
import sys

from jpaged import LLM, PyramidKV, SamplingParams

KEEP = {"sinks": 2, "recent": 6, "window": 4, "pool": 3}
PYRAMID = PyramidKV(budget=24, beta=4.0, **KEEP)
NUM_TOKENS = 16


def tokens(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of every prompt."""
    llm = LLM(
        folder,
        tensor_parallel_size=2,
        dtype="float32",
        block_size=8,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        kv_budget=PYRAMID,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    llm.control.engine.memory.check_invariants()
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    print(json.dumps(tokens(sys.argv[1], json.loads(sys.argv[2]))))

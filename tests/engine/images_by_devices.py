"""Run with a checkpoint's folder and tensor-parallel sizes on a process of 8 devices: prints the tokens as JSON."""

import json
import sys

from vision_checkpoints import picture, prompt_of

from jpaged import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 128}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [prompt_of((3, picture(0), 5)), prompt_of((9,), 1), prompt_of((picture(1), picture(0), 2), 2)]

if __name__ == "__main__":
    found = {}
    for size in map(int, sys.argv[2:]):
        llm = LLM(sys.argv[1], tensor_parallel_size=size, **SETTINGS)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found[size] = [output.outputs[0].token_ids for output in outputs]
        llm._engine.memory.check_invariants()
    print(json.dumps(found))

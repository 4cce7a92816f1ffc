"""Run with a checkpoint's folder and tensor-parallel sizes on a process of 8 devices: prints the tokens as JSON."""

import json
import sys

from vision_checkpoints import MLLAMA_IMAGE, picture, prompt_of

from jpaged import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 128}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ONE, WIDE = picture(0), picture(1, (20, 90))
PARTS = [(3, ONE, 5), (9,), (WIDE, ONE, 2), (2, ONE, 4, WIDE, 3)]
PROMPTS = [prompt_of(parts, seed, MLLAMA_IMAGE) for seed, parts in enumerate(PARTS)]

if __name__ == "__main__":
    found = {}
    for size in map(int, sys.argv[2:]):
        llm = LLM(sys.argv[1], tensor_parallel_size=size, **SETTINGS)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found[size] = [output.outputs[0].token_ids for output in outputs]
        llm._engine.memory.check_invariants()
    print(json.dumps(found))

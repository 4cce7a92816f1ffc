"""Run with a model's folder and its adapters' on a process of 8 devices: prints tokens by tensor_parallel_size."""

import json
import sys

from greedy_reference import random_prompts

from jpaged import LLM, SamplingParams

PROMPTS = random_prompts(lengths=(9, 17, 33, 21), seed=3)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

if __name__ == "__main__":
    model, adapters = sys.argv[1], json.loads(sys.argv[2])
    found = {}
    for size in map(int, sys.argv[3:]):
        llm = LLM(
            model,
            enable_lora=True,
            max_lora_rank=6,
            max_loras=3,
            lora_modules=adapters,
            block_size=8,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=96,
            kv_cache_memory_bytes=1 << 20,
            tensor_parallel_size=size,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, SHORT, False, lora_request=[None, *adapters])
        found[size] = [output.outputs[0].token_ids for output in outputs]
    print(json.dumps(found))

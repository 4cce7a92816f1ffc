"""Measures what reading one long prompt takes, in processor time, for one output token.

    taskset -c 1 .venv/bin/python scripts/bench_prompt.py [MODEL] [TOKENS]

The first prompt, whose shapes are compiled, is not counted; no prompt begins like another.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from jpaged import LLM, SamplingParams

PROMPTS = 3
LEAST_ID, MOST_ID = 100, 40_000
"""Tokens that are drawn: neither special ones nor ones that a small vocabulary lacks."""


def main(model: str = "smollm2-135m", tokens: str = "6000") -> None:
    """Print the seconds of each prompt."""
    length = int(tokens)
    llm = LLM(model, max_model_len=length + 1, dtype="float32", enable_prefix_caching=False)
    rng = np.random.default_rng(0)
    for number in range(PROMPTS + 1):
        prompt = {"prompt_token_ids": rng.integers(LEAST_ID, MOST_ID, length).tolist()}
        before, begin = time.process_time(), time.perf_counter()
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        of_processor, passed = time.process_time() - before, time.perf_counter() - begin
        if number:
            print(f"{length} tokens: {of_processor:.2f} s of the processor in {passed:.2f} s", flush=True)


main(*sys.argv[1:])

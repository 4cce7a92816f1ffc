"""The script of every host: prints what process 0 gets from the engine of all of them, as JSON."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import jax
import late_draws

from jpaged import LLM, BeamSearchParams, PyramidKV, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
SMALL_POOL = {"kv_cache_memory_bytes": 12 * 12288, "preemption_mode": "swap"}
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 200) for _ in range(length)] for length in (1, 9, 16, 30, 5, 22)]


def asked() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids} for ids in prompts()]


def everything(make: Callable[..., LLM]) -> Any:
    """Warm-up, samples, prompt_logprobs, masks, beams, a stream, swapping: every kind of device call; and faults."""
    llm = make(**SMALL_POOL)
    llm.warmup(use_tqdm=False)
    sampled = SamplingParams(n=2, seed=3, max_tokens=24, logprobs=2, prompt_logprobs=1, presence_penalty=0.5)
    masked = SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[5, 17, 40, 99], ignore_eos=True)
    batches = [
        llm.generate(asked(), sampled, use_tqdm=False),
        llm.generate(asked(), masked, use_tqdm=False),
        llm.beam_search(asked()[:2], BeamSearchParams(3, 5), use_tqdm=False),
    ]
    deltas = llm.stream(asked()[1], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    return {
        "tokens": [[[seq.token_ids for seq in output.outputs] for output in outputs] for outputs in batches],
        "prompt_logprobs": [len(output.prompt_logprobs) for output in batches[0]],
        "streamed": [token for delta in deltas for token in delta.token_ids],
        "swaps": sum(output.metrics.num_swaps for output in batches[0]),
        "recompiles": llm.num_recompiles,
        "late": late_draws.undisturbed(llm),
        "interrupted": late_draws.interrupted(llm, 3),
    }


def deterministic(make: Callable[..., LLM]) -> Any:
    outputs = make(deterministic=True).generate(asked(), GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def budgeted(make: Callable[..., LLM]) -> Any:
    """Prompts are cut down, by decisions that all processes have to make alike."""
    keep = PyramidKV(budget=12, sinks=2, recent=6, window=4, pool=3, beta=2.0)
    outputs = make(kv_budget=keep, enable_prefix_caching=False).generate(asked(), GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def endless(make: Callable[..., LLM]) -> Any:
    """Says "running" at the first token, then generates until somebody dies."""
    llm, running = make(), False
    while True:
        for _ in llm.stream(asked(), GREEDY):
            if not running:
                running = True
                print("running", flush=True)


def disagreeing(make: Callable[..., LLM]) -> Any:
    return make(seed=jax.process_index())


def main(address: str, count: str, number: str, task: str, folder: str) -> None:
    if int(count) > 1:
        # The engine must notice a death by itself, and a machine may be suspended for minutes.
        jax.distributed.initialize(address, int(count), int(number), heartbeat_timeout_seconds=900)
    size = len(jax.devices())
    print(json.dumps(globals()[task](lambda **more: LLM(folder, tensor_parallel_size=size, **SETTINGS | more))))


if __name__ == "__main__":
    main(*sys.argv[1:])

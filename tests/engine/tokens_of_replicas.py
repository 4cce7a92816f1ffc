"""Run with the folders of a checkpoint and of states, on 4 devices: what one replica and two generate, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import late_draws
from greedy_reference import random_prompts

from jpaged import LLM, AsyncLLM, BeamSearchParams, PoolingParams, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PROMPTS = [{"prompt_token_ids": ids} for ids in random_prompts(lengths=(1, 5, 9, 16, 23, 30))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(n=2, seed=3, max_tokens=8, logprobs=2, presence_penalty=0.5)
MANY_BIASES = SamplingParams(temperature=0, max_tokens=3, logit_bias=dict.fromkeys(range(200), 1.0), logprobs=1)


async def served(llm: LLM) -> list[list[int]]:
    async def one(number: int) -> list[int]:
        async for output in engine.generate(PROMPTS[number], GREEDY, str(number)):
            last = output
        return last.outputs[0].token_ids

    async with AsyncLLM.from_llm(llm) as engine:
        return await asyncio.gather(*map(one, range(len(PROMPTS))))


def answers(llm: LLM) -> dict:
    mixed = [SAMPLED, GREEDY, MANY_BIASES, GREEDY, SAMPLED, MANY_BIASES]
    batches = [
        llm.generate(PROMPTS, GREEDY, use_tqdm=False),
        llm.generate(PROMPTS, mixed, use_tqdm=False),
        llm.beam_search(PROMPTS[:3], BeamSearchParams(3, 5), use_tqdm=False),
    ]
    streamed = [[] for _ in PROMPTS]
    for delta in llm.stream(PROMPTS, GREEDY):
        streamed[delta.prompt_index] += delta.token_ids
    return {
        "tokens": [[[seq.token_ids for seq in output.outputs] for output in outputs] for outputs in batches],
        "streamed": streamed,
        "served": asyncio.run(served(llm)),
    }


def read(llm: LLM, prompts: list) -> dict:
    """Return what is read of the prompts' own hidden states: scores of some prompts' tokens, and vectors of all."""
    asked = [SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=i % 3 or None) for i in range(len(prompts))]
    scored = [output.prompt_logprobs or [] for output in llm.generate(prompts, asked, use_tqdm=False)]
    modes = [PoolingParams(pooling=("mean", "max", "last")[i % 3]) for i in range(len(prompts))]
    return {
        "scores": [[sorted((t, p.logprob) for t, p in (token or {}).items()) for token in each] for each in scored],
        "vectors": [output.outputs.embedding for output in llm.embed(prompts, False, modes)],
    }


def refusals(llm: LLM) -> list[str]:
    """What two replicas cannot do."""
    try:
        llm.memory_report(replica=2)
    except ValueError as error:
        return [str(error)]
    return []


def pinned(llm: LLM) -> dict:
    """Tokens of a prompt found in the cache by as many requests as there are places, before and while it is pinned."""

    def cached(prompt: dict) -> list[int]:
        llm.reset_prefix_cache()  # does nothing while a prefix is pinned
        return [output.num_cached_tokens for output in llm.generate([prompt] * 8, GREEDY, use_tqdm=False)]

    longest = max(PROMPTS, key=lambda prompt: len(prompt["prompt_token_ids"]))
    before = cached(longest)
    llm.reset_prefix_cache()
    prefix = llm.pin_prefix(longest)
    blocks = [llm.memory_report(replica=i).groups[0].used for i in range(2)]
    while_pinned = cached(longest)
    emptied = llm.reset_prefix_cache()
    llm.unpin(prefix)
    left = [llm.memory_report(replica=i).groups[0].used for i in range(2)]
    try:
        llm.unpin(prefix)
    except ValueError as error:
        again = str(error).replace(str(prefix.seq_id), "N")
    return {
        "before": before,
        "tokens": prefix.num_tokens,
        "blocks": blocks,
        "while": while_pinned,
        "emptied": emptied,
        "left": left,
        "again": again,
    }


def main(folder: str, states: str) -> None:
    one = LLM(folder, tensor_parallel_size=2, **SETTINGS)
    two = LLM(folder, tensor_parallel_size=2, data_parallel_size=2, **SETTINGS)
    two.warmup(use_tqdm=False)
    found = {"one": answers(one), "two": answers(two)}
    engine = two.control.engine
    before = engine.stats.num_steps
    again = two.generate([PROMPTS[0]] * 2 + [PROMPTS[-1]] * 4, GREEDY, use_tqdm=False)
    for replica in engine.replicas:
        replica.memory.check_invariants()
    print(
        json.dumps(
            found
            | {
                "recompiles": two.num_recompiles,
                "steps": [before, one.control.engine.stats.num_steps],
                "cached": [output.num_cached_tokens for output in again],
                "again": [output.outputs[0].token_ids for output in again],
                "busiest": [max(g.used for g in two.memory_report(peak=True, replica=i).groups) for i in range(2)],
                "left": [[replica.memory.num_used_blocks, replica.load] for replica in engine.replicas],
                "read": [read(one, PROMPTS), read(two, PROMPTS)],
                "read alone": [read(one, PROMPTS[4:5] * 2), read(two, PROMPTS[4:5] * 2)],
                "refused": refusals(two),
                "pinned": pinned(two),
                "emptied": two.reset_prefix_cache(),
                "late": [late_draws.undisturbed(one), late_draws.undisturbed(two)],
                "interrupted": late_draws.interrupted(two, 3),
                "saved": late_draws.saved(two, Path(states), 2),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

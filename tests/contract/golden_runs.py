"""Runs of the public API whose tokens version 0.2.0 wrote down: ``golden_runs.py NAME ...`` prints theirs as JSON.

The models are the fixtures of ``written_by_0_2_0/models``: tiny, random, float32. Runs over several devices need a
process with eight virtual ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jpaged import LLM, BeamSearchParams, Layers, LoRARequest, NGram, SamplingParams, StructuredOutputsParams

WRITTEN = Path(__file__).parent / "written_by_0_2_0"
MODELS = WRITTEN / "models"
LLAMA, GEMMA = str(MODELS / "llama"), str(MODELS / "gemma3")
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
}
VOCAB = 211
Answers = list[list[list[int]]]


def random_prompts(*lengths: int, seed: int = 3) -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(seed)
    return [{"prompt_token_ids": rng.integers(3, VOCAB, length).tolist()} for length in lengths]


PROMPTS = random_prompts(3, 9, 17, 20, 24)
MIXED = [
    SamplingParams(temperature=temperature, seed=11 + i, max_tokens=30, ignore_eos=True)
    for i, temperature in enumerate((0.0, 1.0, 0.0, 1.3, 0.8))
]


def answers(outputs: Any) -> Answers:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def generate(llm: LLM, prompts: Any = PROMPTS, params: Any = MIXED, **more: Any) -> Answers:
    return answers(llm.generate(prompts, params, use_tqdm=False, **more))


def tight(**settings: Any) -> LLM:
    """An engine whose pool holds two of the five requests at their full length."""
    return LLM(LLAMA, kv_cache_memory_bytes=10 * page_bytes(), **SMALL, **settings)


def page_bytes() -> int:
    with LLM(LLAMA, **SMALL) as llm:
        return llm.memory_report().page_bytes


def plain() -> Answers:
    return generate(LLM(LLAMA, **SMALL))


def preemption() -> Answers:
    llm = tight()
    outputs = llm.generate(PROMPTS, MIXED, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    return answers(outputs)


def swap() -> Answers:
    llm = tight(preemption_mode="swap")
    outputs = llm.generate(PROMPTS, MIXED, use_tqdm=False)
    assert sum(output.metrics.num_swaps for output in outputs) > 0
    return answers(outputs)


def fork() -> Answers:
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=20, ignore_eos=True)
    return generate(LLM(LLAMA, **SMALL), PROMPTS[2:4], params)


def beams() -> Answers:
    llm = LLM(LLAMA, **SMALL)
    return answers(llm.beam_search(PROMPTS[1:4], BeamSearchParams(3, 12, ignore_eos=True), use_tqdm=False))


def edits() -> Answers:
    params = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=20, presence_penalty=0.8, repetition_penalty=1.2),
        SamplingParams(temperature=0.9, seed=2, max_tokens=20, top_k=7, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=0.0, max_tokens=20, min_tokens=12, logit_bias={5: 3.0}),
        SamplingParams(seed=4, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="(ab|cd|e ){9}")),
        SamplingParams(temperature=0.9, seed=5, max_tokens=12, allowed_token_ids=[9, 10, 30, 77]),
    ]
    return generate(LLM(LLAMA, **SMALL), PROMPTS, params)


def prefix_hits() -> Answers:
    llm = LLM(LLAMA, **SMALL)
    start = PROMPTS[4]["prompt_token_ids"]
    longer = [{"prompt_token_ids": start + prompt["prompt_token_ids"]} for prompt in PROMPTS[:3]]
    first = generate(llm, [PROMPTS[4]], MIXED[:1])
    outputs = llm.generate(longer, MIXED[:3], use_tqdm=False)
    assert all(output.num_cached_tokens > 0 for output in outputs)
    return first + answers(outputs)


def images() -> Answers:
    settings = SMALL | {"max_num_seqs": 8, "max_model_len": 160, "max_num_batched_tokens": 96}
    llm = LLM(GEMMA, kv_cache_memory_bytes=8 << 20, **settings)
    return generate(llm, image_prompts(llm), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))


def image_prompts(llm: LLM) -> list[dict[str, Any]]:
    begin = llm.get_tokenizer().convert_tokens_to_ids("<begin>")
    prompts = []
    for seed, parts in enumerate([(3, "A", 5), (20, "B", 30), (9,), ("A", "B", 2), (31, "A")]):
        rng, ids, shown = np.random.default_rng(seed), [1], []
        for part in parts:
            if isinstance(part, int):
                ids += rng.integers(60, VOCAB, part).tolist()
            else:
                ids.append(begin)
                pixels = np.random.default_rng(ord(part)).integers(0, 256, (40, 30, 3), dtype=np.uint8)
                shown.append(Image.fromarray(pixels))
        prompts.append({"prompt_token_ids": ids} | ({"multi_modal_data": {"image": shown}} if shown else {}))
    return prompts


def lora() -> Answers:
    llm = LLM(str(MODELS / "lora_llama"), enable_lora=True, max_loras=2, max_lora_rank=6, **SMALL)
    small, every = (LoRARequest(name, i, str(MODELS / "adapters" / name)) for i, name in enumerate(("small", "all"), 1))
    requests = [small, None, every, small, every]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return generate(llm, PROMPTS, params, lora_request=requests)


def ngram_drafts() -> Answers:
    return generate(LLM(LLAMA, speculative=NGram(3), **(SMALL | {"max_num_batched_tokens": 32})), repeating(), MIXED)


def layer_drafts() -> Answers:
    return generate(LLM(LLAMA, speculative=Layers(1, 3), **(SMALL | {"max_num_batched_tokens": 32})), PROMPTS, MIXED)


def repeating() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": (prompt["prompt_token_ids"] * 4)[:24]} for prompt in PROMPTS]


def two_shards() -> Answers:
    return generate(LLM(LLAMA, tensor_parallel_size=2, **SMALL))


def two_replicas() -> Answers:
    return generate(LLM(LLAMA, data_parallel_size=2, **SMALL))


RUNS: dict[str, Callable[[], Answers]] = {
    run.__name__: run
    for run in (plain, preemption, swap, fork, beams, edits, prefix_hits, images, lora, ngram_drafts, layer_drafts)
}
ON_DEVICES: dict[str, Callable[[], Answers]] = {run.__name__: run for run in (two_shards, two_replicas)}

if __name__ == "__main__":
    every = RUNS | ON_DEVICES
    print(json.dumps({name: every[name]() for name in sys.argv[1:]}))

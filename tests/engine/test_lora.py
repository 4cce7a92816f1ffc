"""Low-rank adapters in one batch: what PEFT on torch generates, whatever the pool has room for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from greedy_reference import GREEDY, LENGTHS, assert_same_tokens, random_prompts, torch_greedy
from lora_checkpoints import save_adapter, save_all, torch_model

from jpaged import LLM, BeamSearchParams, LoRARequest, NGram, SamplingParams, StateRefused

SETTINGS = {
    "enable_lora": True,
    "max_lora_rank": 6,
    "max_loras": 3,
    "block_size": 8,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
}
NAMES = [None, "small", "all", "some"] * 4


def asked(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def references(model: str, adapters: dict[str, str], prompts: list[list[int]], names: list[str | None], guesses=None):
    found = {}
    for name in dict.fromkeys(names):
        mine = [i for i, other in enumerate(names) if other == name]
        torch = torch_model(model, None if name is None else adapters[name])
        its = None if guesses is None else [guesses[i] for i in mine]
        found |= dict(zip(mine, torch_greedy(torch, [prompts[i] for i in mine], guesses=its), strict=True))
    return [found[i] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    return save_all("llama", tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_a_batch_of_three_adapters_and_none_generates_what_peft_does_in_a_pool_that_evicts_them(
    family: str, tmp_path: Path
):
    model, adapters = save_all(family, tmp_path)
    prompts = random_prompts(lengths=LENGTHS)
    shared = prompts[0] + prompts[1]
    prompts = [shared[: 8 * (i % 3)] + prompt for i, prompt in enumerate(prompts)]
    page_bytes, pages = (24576, 30) if family == "llama" else (16384, 40)
    tight = LLM(
        model,
        **SETTINGS,
        lora_modules=adapters,
        kv_cache_memory_bytes=pages * page_bytes,
        preemption_mode="swap" if family == "gemma3" else "recompute",
    )
    outputs = tight.generate(asked(prompts), GREEDY, use_tqdm=False, lora_request=NAMES)
    again = tight.generate(asked(prompts), GREEDY, use_tqdm=False, lora_request=NAMES)
    stats = tight.stats()
    assert stats.num_preemptions > 0, "the pool is to be short"
    assert stats.num_adapter_loads > 3, "an adapter is to be evicted and read again"
    assert sum(output.num_cached_tokens for output in again) > 0
    tight._engine.memory.check_invariants()
    assert tight._engine.memory.num_used_blocks == 0
    guesses = [output.outputs[0].token_ids for output in outputs]
    expected = references(model, adapters, prompts, NAMES, guesses)
    assert_same_tokens(outputs, expected)
    assert_same_tokens(again, expected)

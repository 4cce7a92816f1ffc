"""Recurrent layers' default checkpoints: far apart inside a long prompt, close to its end, and no token changes."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import CHECKPOINTS, make_checkpoint
from few_shapes import run_in_few_shapes

from jpaged import LLM, SamplingParams
from jpaged.memory import StateCheckpoints

SETTINGS = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 1200,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def test_a_prompt_is_found_up_to_its_last_checkpoint_and_goes_on_with_the_same_tokens(tmp_path):
    make_checkpoint("mamba2", tmp_path, num_hidden_layers=1)
    prompt = np.random.default_rng(0).integers(3, CHECKPOINTS["mamba2"].vocab_size, 1100).tolist()
    llm, plain = (LLM(str(tmp_path), **SETTINGS, enable_prefix_caching=cached) for cached in (True, False))
    run_in_few_shapes(llm)
    run_in_few_shapes(plain)
    (policy,) = (group.spec.policy for group in llm.control.engine.memory.layout.groups)
    assert isinstance(policy, StateCheckpoints) and (policy.interval, policy.spacing) == (512, 2048)

    def tokens(engine: LLM) -> tuple[list[int], int | None]:
        (output,) = engine.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens

    wanted, _ = tokens(plain)
    assert [tokens(llm), tokens(llm)] == [(wanted, 0), (wanted, 1088)]
    llm.control.engine.memory.check_invariants()
    (states,) = llm.memory_report().groups
    assert states.evictable <= 3, "after 1024 tokens and at the prompt's end; none was kept at 512"


SMALL = SETTINGS | {
    "block_size": 8,
    "state_checkpoint_interval": 64,
    "max_model_len": 200,
    "max_num_batched_tokens": 64,
}


@pytest.mark.parametrize("name", ["jamba", pytest.param("qwen3_next", marks=pytest.mark.nightly)])
def test_turns_go_on_from_the_ends_of_prompts_messages_and_answers_with_the_same_tokens(name, tmp_path):
    make_checkpoint(name, tmp_path)
    fresh = np.random.default_rng(0)

    def some(number: int) -> list[int]:
        return fresh.integers(3, CHECKPOINTS[name].vocab_size, number).tolist()

    llm, plain = (LLM(str(tmp_path), **SMALL, enable_prefix_caching=cached) for cached in (True, False))
    answer = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)

    def said(engine: LLM, prompt: list[int], *ends: int) -> tuple[list[int], int]:
        (output,) = engine.generate([{"prompt_token_ids": prompt, "prefix_ends": ends}], answer, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    first, hits = some(75), []
    answered, _ = said(llm, first, 30)
    prompts = [
        [*first[:30], *some(20)],  # at a message's end, which the first prompt named
        [*first, *some(9)],  # at the prompt's end
        [*first, *answered, *some(9)],  # at the end of the answer
        [*first[:50], *some(20)],  # where no end was known
        [*first[:50], *some(30)],  # which is learnt from it
    ]
    for prompt in prompts:
        tokens, hit = said(llm, prompt)
        assert tokens == said(plain, prompt)[0]
        hits.append(hit)
    assert answered == said(plain, first)[0]
    assert hits == [24, 72, 88, 24, 48]
    llm.control.engine.memory.check_invariants()
    assert "states that no request has begun with" in str(llm.memory_report())

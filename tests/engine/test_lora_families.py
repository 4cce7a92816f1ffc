"""Adapters of linear layers that are fused, beside experts or beside recurrent states give what PEFT on torch does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from greedy_reference import assert_same_tokens, one_torch_thread, random_prompts, torch_greedy
from lora_checkpoints import save_adapter, torch_model

from jpaged import LLM, SamplingParams

SETTINGS = {
    "enable_lora": True,
    "max_lora_rank": 4,
    "max_loras": 2,
    "block_size": 8,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 23,
}
NAMES = [None, "all", "few"]
PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(lengths=(9, 17, 33), seed=3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_ATTENTION = r".*self_attn\.\w*_proj\w*"
FAMILIES = {
    "qwen3_moe": _ATTENTION,  # beside routed experts, for which PEFT's "all-linear" has parameters that are refused
    "deepseek_v2": r".*self_attn\.(?!kv_b)\w*_proj\w*",  # what goes out of latents is no matrix of its own here
    "opt": "all-linear",
    "lfm2": "all-linear",  # short convolutions
    "bamba": "all-linear",  # Mamba 2, whose projection holds five parts
    "qwen3_5": "all-linear",  # the delta rule
}


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_scores_are_those_of_peft(family: str, tmp_path: Path):
    model = str(tmp_path / family)
    make_checkpoint(family, model)
    adapters = {
        "all": save_adapter(model, tmp_path, "all", r=4, lora_alpha=2, target_modules=FAMILIES[family]),
        "few": save_adapter(
            model, tmp_path, "few", r=2, lora_alpha=2, target_modules=r".*\.1\..*(in_proj|q_proj|o_proj)\w*"
        ),
    }
    with LLM(model, **SETTINGS, lora_modules=adapters) as llm:
        outputs = [llm.generate(PROMPTS, GREEDY, False, lora_request=name) for name in NAMES]
        mixed = llm.generate(PROMPTS, GREEDY, False, lora_request=NAMES)
        scores = [[one.outputs.score for one in llm.score(PROMPTS, use_tqdm=False, lora_request=n)] for n in NAMES]
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    for number, (name, found, its_scores) in enumerate(zip(NAMES, outputs, scores, strict=True)):
        peft = torch_model(model, None if name is None else adapters[name])
        guesses = [output.outputs[0].token_ids for output in found]
        expected = torch_greedy(peft, prompts, num_tokens=12, guesses=guesses)
        assert_same_tokens(found, expected, compared=0.6)  # a tie early in one of three prompts
        assert_same_tokens([mixed[number]], [expected[number]], compared=0.0)
        with torch.no_grad(), one_torch_thread():
            for prompt, score in zip(prompts, its_scores, strict=True):
                logprobs = peft(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
                want = logprobs.gather(1, torch.tensor(prompt[1:])[:, None]).sum().item()
                assert score == pytest.approx(want, abs=2e-3)
    assert len({tuple(one) for one in scores}) == len(NAMES), "an adapter changes nothing"

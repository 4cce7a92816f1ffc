"""A draft model beside one with eyes sees text only, and changes no token."""

from __future__ import annotations

import pytest
from checkpoints import make_checkpoint
from vision_checkpoints import FAMILIES, check_empty, make_gemma3, picture, prompt_of

from jpaged import LLM, DraftModel, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 24,
    "kv_cache_memory_bytes": 4 << 20,
}
PARAMS = [SamplingParams(temperature=t, seed=i, max_tokens=16, ignore_eos=True) for i, t in enumerate((0.0, 0.8, 0.0))]
PARTS = [(20, picture(0), 9), (7,), (3, picture(1, (20, 70)), 25)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mllama", "gemma3", "llava"])
def test_tokens_are_those_without_drafts(name, tmp_path):
    make, placeholder = FAMILIES[name]
    make(tmp_path / "model")
    make_checkpoint("llama", tmp_path / "draft")
    prompts = [prompt_of(parts, seed, placeholder) for seed, parts in enumerate(PARTS)]

    def answers(llm):
        return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]

    expected = answers(LLM(str(tmp_path / "model"), **SETTINGS))
    llm = LLM(str(tmp_path / "model"), speculative=DraftModel(str(tmp_path / "draft"), tokens=2), **SETTINGS)
    assert answers(llm) == expected and llm.stats().num_drafts > 0
    assert answers(llm) == expected and llm.stats().prefix_hits > 0
    check_empty(llm)


@pytest.mark.nightly
def test_a_draft_model_with_eyes_keeps_them_shut(tmp_path):
    make_gemma3(tmp_path)
    llm = LLM(str(tmp_path), speculative=DraftModel(str(tmp_path), tokens=2), **SETTINGS)
    prompt = prompt_of(PARTS[0])
    expected = LLM(str(tmp_path), **SETTINGS).generate(prompt, PARAMS[0], use_tqdm=False)
    found = llm.generate(prompt, PARAMS[0], use_tqdm=False)
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert [group.name for group in llm.memory_report().groups if "images" in group.name] == ["images"]

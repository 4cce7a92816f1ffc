"""An engine whose pool holds latents: one row a token, forked, searched by beams, and computed token by token."""

from __future__ import annotations

import pytest
from beam_reference import assert_same_beams, torch_beams
from checkpoints import CHECKPOINTS, make_checkpoint
from greedy_reference import random_prompts

from jpaged import LLM, BeamSearchParams, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 8, "max_model_len": 96, "max_num_batched_tokens": 64}
PROMPTS = random_prompts(lengths=(3, 8, 17, 33))
IDS = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
LAYERS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint's folder and transformers' model: one layer with an MLP, one with experts."""
    folder = tmp_path_factory.mktemp("deepseek")
    return str(folder), make_checkpoint("deepseek_v3", folder, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLM(checkpoint[0], **SETTINGS)


@pytest.fixture
def llm(engine):
    """The engine; after every test its memory is empty and sound."""
    yield engine
    engine.control.engine.memory.check_invariants()
    assert engine.control.engine.memory.num_used_blocks == 0


def tokens(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_a_token_takes_one_padded_row_a_layer_and_no_values(llm):
    config = CHECKPOINTS["deepseek_v3"]
    assert config.kv_lora_rank + config.qk_rope_head_dim <= 128
    llm.generate(IDS[3], SamplingParams(max_tokens=1), use_tqdm=False)
    (group,) = llm.memory_report(peak=True).groups
    assert group.used == -(-len(PROMPTS[3]) // 8)
    assert llm.control.engine.runner.spec.layout.groups[0].spec.real_bytes == LAYERS * 8 * 128 * 4


def test_four_outputs_share_the_prompt_and_output_0_is_what_one_output_gives(llm):
    drawn = SamplingParams(n=4, seed=7, max_tokens=20, ignore_eos=True)
    outputs = tokens(llm.generate(IDS, drawn, use_tqdm=False))
    assert all(len({tuple(ids) for ids in each}) == 4 for each in outputs)
    alone = SamplingParams(n=1, seed=7, max_tokens=20, ignore_eos=True)
    assert tokens(llm.generate(IDS, alone, use_tqdm=False)) == [each[:1] for each in outputs]


def test_beams_of_four_are_those_of_transformers(llm, checkpoint):
    params = BeamSearchParams(4, 12, ignore_eos=True)
    expected = torch_beams(checkpoint[1], PROMPTS, params)
    assert_same_beams(llm.beam_search(IDS, params, use_tqdm=False), expected, params)


def test_a_deterministic_engine_gives_a_prompt_the_same_bits_alone_and_among_others(checkpoint):
    llm = LLM(checkpoint[0], deterministic=True, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    together = llm.generate(IDS, params, use_tqdm=False)[1].outputs[0]
    (alone,) = llm.generate(IDS[1], params, use_tqdm=False)
    assert alone.outputs[0].token_ids == together.token_ids
    assert alone.outputs[0].logprobs == together.logprobs

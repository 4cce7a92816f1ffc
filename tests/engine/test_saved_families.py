"""Saved states of every kind of layer, of engines that draft, and of more devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from greedy_reference import random_prompts
from on_devices import printed_on_devices

from jpaged import LLM, Layers, NGram, PyramidKV, SamplingParams

HERE = Path(__file__).parent
SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 16}
PROMPTS = [*random_prompts(lengths=(40, 9, 33)), [5, 6, 7, 8, 9] * 5]
PARAMS = [
    SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True, logprobs=1)
    for i, temperature in enumerate((0.0, 1.0, 0.8, 0.0))
]


def begin(model, steps, **options):
    llm = LLM(str(model), **SETTINGS | options)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        llm.control.engine.add(llm.input_processor.process({"prompt_token_ids": prompt}, params))
    for _ in range(steps):
        llm.control.engine.step()
    return llm


def undisturbed(model, **options):
    llm = LLM(str(model), **SETTINGS | options)
    return answers(llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False))


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def check(model, folder, steps, **options):
    llm = begin(model, steps - 2, **options)
    llm.save_state(folder)
    for _ in range(2):
        llm.control.engine.step()
    llm.save_state(folder)  # takes over what the first has of the blocks that are as they were
    running = sum(seq.num_computed for request in llm.control.engine.scheduler.running for seq in request.live)
    llm.close()
    other = LLM.restore_state(folder)
    going_on = sum(seq.num_computed for request in other.control.engine.scheduler.running for seq in request.live)
    assert going_on == running > 0, "something is computed again"
    other.control.engine.memory.check_invariants()
    outputs = other.resume(use_tqdm=False)
    assert other.control.engine.memory.num_used_blocks == 0
    other.control.engine.memory.check_invariants()
    return outputs


def test_a_deterministic_engine_goes_on_to_the_last_bit(tmp_path):
    make_checkpoint("llama", tmp_path)
    llm = LLM(str(tmp_path), deterministic=True, **SETTINGS)
    expected = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    for steps in (4, 17):
        found = check(tmp_path, tmp_path / f"state-{steps}", steps, deterministic=True)
        for one, other in zip(expected, found, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            assert one.outputs[0].logprobs == other.outputs[0].logprobs
            assert one.outputs[0].cumulative_logprob == other.outputs[0].cumulative_logprob


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma2", {}),
        ("jamba", {"state_checkpoint_interval": 16}),
        ("bamba", {"prefix_eviction": "predicted", "state_checkpoint_interval": 16}),
        ("deepseek_v2", {}),
        ("llama", {"speculative": NGram(tokens=3)}),
        ("llama", {"speculative": Layers(1, tokens=2)}),
        ("llama", {"kv_budget": PyramidKV(budget=24, recent=8, window=4), "enable_prefix_caching": False}),
        ("llama", {"kv_cache_dtype": "int8"}),
        ("qwen3_moe", {"quantization": "int8"}),
    ],
)
def test_every_kind_of_layer_and_of_drafts_goes_on(tmp_path, name, options):
    make_checkpoint(name, tmp_path)
    expected = undisturbed(tmp_path, **options)
    for steps in (3, 5, 12):
        found = check(tmp_path, tmp_path / f"state-{steps}", steps, **options)
        assert answers(found) == expected, f"after {steps} steps"


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", ["2,1-2,1", "1,1-2,1", "2,1-1,1", "1,2-1,2", "1,2-1,1"])
def test_more_or_fewer_devices_give_the_same_answers(tmp_path, sizes):
    """Tensor and data parallel sizes before and after; where they differ all is computed again."""
    make_checkpoint("llama", tmp_path)
    found = printed_on_devices(2, HERE / "saved_by_devices.py", tmp_path, sizes)
    before, after = sizes.split("-")
    assert found["answers"] == undisturbed(tmp_path)
    assert (found["kept"] > 0) == (before == after)

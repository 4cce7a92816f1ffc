"""Gemma 3 with images: tokens are those of transformers, each image is encoded once, and nothing leaks."""

from __future__ import annotations

import pytest
import torch
from beam_reference import assert_same_beams, torch_beams
from greedy_reference import assert_same_tokens
from images_by_devices import PARAMS, assert_like, on_devices, prompts_with
from vision_checkpoints import (
    BEGIN,
    IMAGE_TOKENS,
    assert_forks,
    check_empty,
    make_gemma3,
    picture,
    prompt_of,
    seen_by_torch,
    torch_vision_greedy,
)

from jpaged import LLM, BeamSearchParams, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 16,
    "max_model_len": 160,
    "max_num_batched_tokens": 96,
    "kv_cache_memory_bytes": 8 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
A, B, C = picture(0), picture(1), picture(2)
DOT, LINE = picture(3, (1, 1)), picture(4, (1, 40))
PARTS = [
    (3, A, 5),
    (A,),
    (20, B, 30),
    (9,),
    (A, B, 2),
    (3, A, 5, C, 1),
    (31,),
    (2, C, 33, A, 4),
    (16, A, 1),
    (1, B, B, DOT, 1, A, LINE, 1),
    (1,),
    (13, C),
    (3, A, 9),
    (57,),
    (24, A, 24),
    (5, B, 6),
]
PROMPTS = [prompt_of(parts, seed) for seed, parts in enumerate(PARTS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    return str(folder), make_gemma3(folder)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLM(checkpoint[0], **SETTINGS)


@pytest.fixture(scope="module")
def expected(engine, checkpoint):
    requests = [engine.input_processor.process(prompt, GREEDY) for prompt in PROMPTS]
    return torch_vision_greedy(checkpoint[1], requests, 48)


@pytest.fixture
def llm(engine):
    """The engine; after every test its memory is empty and sound."""
    yield engine
    check_empty(engine)


def test_greedy_tokens_are_those_of_transformers(llm, expected):
    assert_same_tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)


def test_greedy_tokens_are_the_same_with_prefix_hits(llm, expected):
    assert_same_tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert llm.stats().prefix_hits > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_greedy_tokens_are_the_same_in_chunks_of_24_and_a_pool_that_forces_preemption(checkpoint, expected, mode):
    small = SETTINGS | {"long_prefill_token_threshold": 24, "kv_cache_memory_bytes": 30 << 14}
    llm = LLM(checkpoint[0], preemption_mode=mode, **small)
    assert_same_tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert llm.stats().num_preemptions > 0 and (llm.stats().num_swaps > 0) == (mode == "swap")
    check_empty(llm)


def test_log_probabilities_of_the_prompt_are_those_of_transformers(llm, checkpoint):
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[5], scored, use_tqdm=False)
    request = llm.input_processor.process(PROMPTS[5], GREEDY)
    ids = torch.tensor([request.prompt_token_ids])
    with torch.inference_mode():
        logits = checkpoint[1](ids, attention_mask=torch.ones_like(ids), **seen_by_torch(request)).logits[0].double()
    wanted = logits.log_softmax(-1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    found = [ours[token].logprob for ours, token in zip(output.prompt_logprobs[1:], ids[0, 1:].tolist(), strict=True)]
    assert found == pytest.approx(wanted.tolist(), abs=1e-4) and len(found) > 2 * IMAGE_TOKENS


def test_four_outputs_fork_behind_an_image_and_draw_from_what_transformers_computes(llm, checkpoint):
    assert_forks(llm, checkpoint[1], PROMPTS[:4], [seen_by_torch] * 4)


def test_beams_of_four_are_those_of_transformers(llm, checkpoint):
    params = BeamSearchParams(4, 8, ignore_eos=True)
    requests = [llm.input_processor.process(prompt, GREEDY) for prompt in PROMPTS[:5]]
    prompts, more = [r.prompt_token_ids for r in requests], [seen_by_torch(r) for r in requests]
    expected = torch_beams(checkpoint[1], prompts, params, more=more)
    assert_same_beams(llm.beam_search(PROMPTS[:5], params, use_tqdm=False), expected, params)


def test_the_same_image_in_50_requests_is_encoded_once_and_another_once_more(llm):
    llm.reset_prefix_cache()
    before = llm.stats().num_encoded_images
    one, other = picture(10), picture(11)
    prompts = [prompt_of((1 + n % 9, one, n % 5), n) for n in range(50)]
    few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate(prompts, few, use_tqdm=False)
    assert llm.stats().num_encoded_images == before + 1
    llm.generate([prompt_of((4, one, 2, other), 99)], few, use_tqdm=False)
    assert llm.stats().num_encoded_images == before + 2
    images = next(group for group in llm.memory_report().groups if group.name == "images")
    assert (images.used, images.evictable) == (0, 2 * IMAGE_TOKENS // 8)


def test_equal_images_share_a_prefix_and_different_ones_never_do(llm):
    few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def cached(image):
        return llm.generate([prompt_of((20, image, 20), 5)], few, use_tqdm=False)[0].num_cached_tokens

    llm.reset_prefix_cache()
    assert cached(A) == 0
    same_pixels, other_pixels = A.copy(), A.copy()
    other_pixels.putpixel((0, 0), (1, 2, 3))
    assert cached(same_pixels) == 56
    assert cached(other_pixels) == 16, "the blocks before the image's first token are shared"
    assert cached(other_pixels) == 56


@pytest.mark.nightly
def test_two_devices_and_replicas_give_the_tokens_of_transformers(checkpoint, llm):
    requests = [llm.input_processor.process(prompt, GREEDY) for prompt in prompts_with(BEGIN)]
    expected = torch_vision_greedy(checkpoint[1], requests, PARAMS.max_tokens)
    assert_like(on_devices(checkpoint[0], BEGIN, 1, 2, "2x1"), expected)


def test_features_that_the_pool_lost_are_loaded_from_host_memory_and_not_encoded_again(checkpoint, llm):
    small = SETTINGS | {"kv_cache_memory_bytes": 40 << 14}
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [prompt_of((3 + n, picture(20), 4), 40 + n) for n in range(2)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, few, use_tqdm=False)]
    with LLM(checkpoint[0], kv_offloading_size=1 / 64, kv_offloading_break_even=1, **small) as tiered:
        pictures = tiered.control.engine.memory.shared["images"]
        (first,) = tiered.generate(prompts[:1], few, use_tqdm=False)
        tiered.generate([{"prompt_token_ids": [3 + n] * 140} for n in range(8)], few, use_tqdm=False)
        assert not pictures.cached, "the pool has lost it"
        before = tiered.stats()
        (second,) = tiered.generate(prompts[1:], few, use_tqdm=False)
        assert [first.outputs[0].token_ids, second.outputs[0].token_ids] == expected
        after = tiered.stats()
        assert after.num_encoded_images == before.num_encoded_images == 1
        assert after.ram.read_bytes > before.ram.read_bytes and not after.ram.failures

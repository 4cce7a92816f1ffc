"""LLaVA-OneVision: images of many sizes, cut by chunks, give the tokens of transformers."""

from __future__ import annotations

import pytest
import torch
from greedy_reference import assert_same_tokens
from vision_checkpoints import IMAGE, LLAVA_PROCESSOR, make_llava, picture, prompt_of, torch_vision_greedy

from jpaged import LLM, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 160,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 4 << 20,
    "long_prefill_token_threshold": 24,
}
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
WIDE, TALL, LARGE = picture(0, (20, 70)), picture(1, (90, 20)), picture(2, (120, 110))
PARTS = [(3, WIDE, 5), (TALL,), (11,), (30, LARGE, 9), (WIDE, TALL, 4), (3, WIDE, 7), (2, LARGE)]
PROMPTS = [prompt_of(parts, seed % 5, IMAGE) for seed, parts in enumerate(PARTS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    return str(folder), make_llava(folder)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLM(checkpoint[0], **SETTINGS)


def seen(parts):
    """What transformers' model takes of the images."""
    images = [part for part in parts if not isinstance(part, int)]
    if not images:
        return {}
    made = LLAVA_PROCESSOR([images], return_tensors="pt")
    return {
        "pixel_values": made["pixel_values"],
        "image_sizes": made["image_sizes"],
        "batch_num_images": torch.tensor([len(images)]),
    }


@pytest.fixture(scope="module")
def expected(engine, checkpoint):
    requests = [engine.input_processor.process(prompt, GREEDY) for prompt in PROMPTS]
    assert len({image.length for request in requests for image in request.images}) == 4
    return torch_vision_greedy(checkpoint[1], requests, NUM_TOKENS, [seen(parts) for parts in PARTS])


def check(llm):
    llm._engine.memory.check_invariants()
    assert llm._engine.memory.num_used_blocks == 0


def test_greedy_tokens_are_those_of_transformers_in_chunks_that_cut_images(engine, expected):
    assert_same_tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert engine.stats().num_encoded_images == 5, "wide and tall are other images beside each other than alone"
    hits = engine.stats().prefix_hits
    assert_same_tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert engine.stats().prefix_hits > hits
    check(engine)


@pytest.mark.nightly
def test_greedy_tokens_are_the_same_in_a_pool_that_forces_preemption(engine, checkpoint, expected):
    page = engine.memory_report().page_bytes
    llm = LLM(checkpoint[0], **(SETTINGS | {"kv_cache_memory_bytes": 45 * 9216 // page * page}))
    assert_same_tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert llm.stats().num_preemptions > 0
    check(llm)

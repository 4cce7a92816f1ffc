"""LLaVA-OneVision: images of many sizes, cut by chunks, give the tokens of transformers."""

from __future__ import annotations

import pytest
import torch
from beam_reference import assert_same_beams, torch_beams
from greedy_reference import assert_same_tokens
from images_by_devices import PARAMS, assert_like, on_devices, prompts_with
from images_by_devices import PARTS as OF_DEVICES
from vision_checkpoints import (
    IMAGE,
    LLAVA_PROCESSOR,
    assert_forks,
    check_empty,
    make_llava,
    picture,
    prompt_of,
    torch_vision_greedy,
)

from jpaged import LLM, BeamSearchParams, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 16,
    "max_model_len": 192,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 8 << 20,
    "long_prefill_token_threshold": 24,
}
NUM_TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
WIDE, TALL, LARGE = picture(0, (20, 70)), picture(1, (90, 20)), picture(2, (120, 110))
DOT, LINE = picture(3, (1, 1)), picture(4, (1, 40))
PARTS = [
    (3, WIDE, 5),
    (TALL,),
    (11,),
    (30, LARGE, 9),
    (WIDE, TALL, 4),
    (3, WIDE, 7),
    (2, LINE),
    (20, WIDE, 30),
    (31,),
    (2, TALL, 33),
    (16, DOT, 1),
    (1,),
    (7, TALL, DOT, WIDE, LINE, LARGE, 7),
    (57,),
    (24, WIDE, 24),
    (5, LARGE, 6),
]
PROMPTS = [prompt_of(parts, seed % 5, IMAGE) for seed, parts in enumerate(PARTS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    return str(folder), make_llava(folder)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLM(checkpoint[0], **SETTINGS)


def seen(parts):
    """Return what transformers' model takes of the images."""
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
    assert len({image.length for request in requests for image in request.asks.get("images", ())}) == 6
    return torch_vision_greedy(checkpoint[1], requests, NUM_TOKENS, [seen(parts) for parts in PARTS])


def test_greedy_tokens_are_those_of_transformers_in_chunks_that_cut_images(engine, expected):
    assert_same_tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert engine.stats().num_encoded_images == 10, "wide and tall are other images next to each other than alone"
    hits = engine.stats().prefix_hits
    assert_same_tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert engine.stats().prefix_hits > hits
    check_empty(engine)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_greedy_tokens_are_the_same_in_a_pool_that_forces_preemption(engine, checkpoint, expected, mode):
    page = engine.memory_report().page_bytes
    small = SETTINGS | {"kv_cache_memory_bytes": 45 * 9216 // page * page}
    llm = LLM(checkpoint[0], preemption_mode=mode, **small)
    assert_same_tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert llm.stats().num_preemptions > 0 and (llm.stats().num_swaps > 0) == (mode == "swap")
    check_empty(llm)


@pytest.mark.nightly
def test_beams_of_four_are_those_of_transformers(engine, checkpoint):
    params = BeamSearchParams(4, 8, ignore_eos=True)
    requests = [engine.input_processor.process(prompt, GREEDY) for prompt in PROMPTS[:4]]
    prompts, more = [r.prompt_token_ids for r in requests], [seen(parts) for parts in PARTS[:4]]
    wanted = torch_beams(checkpoint[1], prompts, params, more=more)
    assert_same_beams(engine.beam_search(PROMPTS[:4], params, use_tqdm=False), wanted, params)
    check_empty(engine)


@pytest.mark.nightly
def test_four_outputs_fork_behind_an_image_and_draw_from_what_transformers_computes(engine, checkpoint):
    assert_forks(engine, checkpoint[1], PROMPTS[:4], [lambda _, parts=parts: seen(parts) for parts in PARTS[:4]])
    check_empty(engine)


@pytest.mark.nightly
def test_two_devices_and_replicas_give_the_tokens_of_transformers(engine, checkpoint):
    requests = [engine.input_processor.process(prompt, GREEDY) for prompt in prompts_with(IMAGE)]
    wanted = torch_vision_greedy(checkpoint[1], requests, PARAMS.max_tokens, [seen(parts) for parts in OF_DEVICES])
    sizes = {image.length for request in requests for image in request.asks.get("images", ())}
    assert_like(on_devices(checkpoint[0], IMAGE, 1, 2, "2x1", recompiles=len(sizes)), wanted)

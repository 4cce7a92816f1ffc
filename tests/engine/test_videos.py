"""LLaVA-OneVision's videos give the tokens of transformers, with pictures beside them, from frames and from files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from disturbed import assert_tokens_stay
from greedy_reference import assert_same_tokens
from PIL import Image
from transformers import SiglipImageProcessorPil
from vision_checkpoints import (
    END,
    IMAGE,
    LLAVA_PROCESSOR,
    NUM_PLAIN,
    SIZE,
    VOCAB,
    check_empty,
    make_llava,
    picture,
    torch_vision_greedy,
)

from jpaged import LLM, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 8,
    "max_model_len": 192,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 8 << 20,
    "long_prefill_token_threshold": 24,
}
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def frames_of(seed: int, number: int, size: tuple[int, int] = (20, 36)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (number, *size, 3), dtype=np.uint8)


ONE, FEW, MANY, WIDE = frames_of(0, 1), frames_of(1, 5), frames_of(2, 19), frames_of(3, 9, (1, 40))
PICTURE = picture(0, (20, 70))
PARTS = [
    (3, FEW, 5),
    (MANY, 9),
    (ONE,),
    (2, WIDE, 3, FEW, 1),
    (4, PICTURE, 2, FEW, 7),
    (FEW, PICTURE),
    (31,),
    (11, np.concatenate([MANY[:8], FEW]), 2),
]


def prompt_of(parts, seed=0):
    """Return a prompt of ids: a number is as many random tokens, an array a video, anything else a picture."""
    rng, ids = np.random.default_rng(seed), [1]
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(NUM_PLAIN, VOCAB, part).tolist()
        else:
            ids.append(END if isinstance(part, np.ndarray) else IMAGE)
    videos = [part for part in parts if isinstance(part, np.ndarray)]
    images = [part for part in parts if not isinstance(part, int | np.ndarray)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images, "video": videos}}


def seen(parts):
    """Return what transformers' model takes of pictures and videos."""
    images = [part for part in parts if not isinstance(part, int | np.ndarray)]
    found = {}
    if images:
        made = LLAVA_PROCESSOR([images], return_tensors="pt")
        found = {name: made[name] for name in ("pixel_values", "image_sizes")}
        found["batch_num_images"] = torch.tensor([len(images)])
    videos = [pixels_of(part) for part in parts if isinstance(part, np.ndarray)]
    if videos:
        found["pixel_values_videos"] = videos
    return found


OF_FRAMES = SiglipImageProcessorPil(
    size=SIZE, image_mean=LLAVA_PROCESSOR.image_mean, image_std=LLAVA_PROCESSOR.image_std, resample=3
)
"""transformers' processor of single pictures on Pillow, with the settings of its LlavaOnevisionVideoProcessor."""


def pixels_of(video: np.ndarray) -> torch.Tensor:
    pictures = [Image.fromarray(frame) for frame in video]
    return OF_FRAMES(pictures, return_tensors="pt")["pixel_values"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava-video")
    model = make_llava(folder)
    whole = model.model.get_video_features

    def one_by_one(pixel_values_videos, **kwargs):
        """Videos of several lengths: transformers wants them padded to one, which would give other tokens."""
        if isinstance(pixel_values_videos, torch.Tensor):
            return whole(pixel_values_videos, **kwargs)
        made = [whole(video[None], **kwargs) for video in pixel_values_videos]
        made[0].pooler_output = torch.cat([each.pooler_output for each in made], dim=1)
        return made[0]

    model.model.get_video_features = one_by_one
    return str(folder), model


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLM(checkpoint[0], **SETTINGS)


@pytest.fixture(scope="module")
def expected(engine, checkpoint):
    prompts = [prompt_of(parts, seed) for seed, parts in enumerate(PARTS)]
    requests = [engine.input_processor.process(prompt, GREEDY) for prompt in prompts]
    return prompts, torch_vision_greedy(checkpoint[1], requests, NUM_TOKENS, [seen(parts) for parts in PARTS])


def test_greedy_tokens_are_those_of_transformers_in_chunks_that_cut_videos(engine, expected):
    prompts, wanted = expected
    for _ in range(2):
        assert_same_tokens(engine.generate(prompts, GREEDY, use_tqdm=False), wanted)
    assert engine.stats().prefix_hits > 0
    check_empty(engine)


@pytest.mark.nightly
def test_nothing_that_happens_to_a_request_changes_its_tokens(checkpoint, tmp_path):
    prompts = [prompt_of(parts, seed) for seed, parts in enumerate(PARTS)]
    assert_tokens_stay(checkpoint[0], SETTINGS, prompts, GREEDY, tmp_path)

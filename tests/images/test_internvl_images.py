"""Tiles of InternVL's pictures are those of transformers' processor on Pillow, for pictures of any size."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from thorough import examples
from transformers import GotOcr2ImageProcessorPil, InternVLConfig

from jpaged.images import ImageSources, read_images
from jpaged.images.clips import Clip
from jpaged.images.frames import Sampling, middles
from jpaged.images.internvl import InternVLImageProcessor, InternVLVideoProcessor
from jpaged.images.prompts import Placeholder

WORDS = {"<img>": 20, "</img>": 21, "<IMG_CONTEXT>": 22, "<video>": 23}
TOKENIZER = SimpleNamespace(
    convert_tokens_to_ids=WORDS.get,
    convert_ids_to_tokens=lambda token: next(word for word, number in WORDS.items() if number == token),
    encode=lambda text, add_special_tokens: [ord(letter) for letter in text],
)
CHANGES = [
    {},
    {"min_patches": 2, "max_patches": 5, "image_mean": [0.5] * 3, "image_std": [0.3] * 3},
    {"max_patches": 1, "do_normalize": False, "resample": 2},
    {"min_patches": 3, "max_patches": 3, "do_rescale": False},
]
TILE, PATCH = 24, 4


def both(folder, changes):
    theirs = GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, **changes)
    theirs.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 9}))
    return theirs, InternVLImageProcessor.open(folder, config_of(), TOKENIZER)


def config_of(**more):
    return InternVLConfig(vision_config={"patch_size": PATCH, "image_size": TILE}, image_token_id=22, **more)


@pytest.mark.parametrize("changes", CHANGES)
def test_tiles_are_those_of_transformers(tmp_path, changes):
    theirs, ours = both(tmp_path, changes)

    @settings(max_examples=examples(8), deadline=None)
    @given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 99), st.booleans())
    def check(height, width, seed, crops):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        (picture,) = read_images([image := Image.fromarray(pixels)], ImageSources())
        wanted = theirs([image], crop_to_patches=crops, return_tensors="np")["pixel_values"]
        own = ours if crops else ours.with_settings({"crop_to_patches": False}, of_request=True)
        made, tiles = own.prepare(picture, alone=True), len(wanted)
        assert own.tokens(picture.size, alone=True) == len(made.takes) == tiles * 9
        assert made.features == tiles * 10 <= own.most_features
        square = (TILE // PATCH) ** 2
        assert made.arrays["tiles"].tolist() == [square + 1, 3] * tiles
        shape = (tiles, square + 4, 3, PATCH, PATCH)
        each = made.arrays["pixels"].reshape(*shape[:3], -1).astype(np.float32)
        each = (each * made.arrays["scale"][:, None] + made.arrays["shift"][:, None]).reshape(shape)
        places = made.arrays["places"].reshape(tiles, square + 4, 4)
        assert (places[:, square:] == -1).all() and (places[:, :square, 2:] == TILE // PATCH).all()
        whole = np.empty_like(wanted)
        for row, column, numbers in zip(*places[0, :square, :2].T, each.swapaxes(0, 1), strict=False):
            whole[..., row * PATCH :, column * PATCH :][..., :PATCH, :PATCH] = numbers
        np.testing.assert_allclose(whole, wanted, rtol=1e-5, atol=2e-5)
        taken = made.takes.reshape(tiles, 9) % 10
        assert (taken == np.arange(9)).all(), "the feature of the class is none that a token takes"
        said = own.expansion(picture.size, alone=True)
        assert said.text == f"<img>{'<IMG_CONTEXT>' * 9 * tiles}</img>" and said.ids == (20, *[22] * 9 * tiles, 21)

    check()


@given(st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=examples(100), deadline=None)
def test_frames_are_those_of_transformers(total, number):
    """Its own class needs torchvision; this is its formula."""
    number = min(number, total)
    wanted = torch.arange(total / number / 2, total, total / number).int()
    found = middles(total, None, Sampling(num_frames=number))
    assert found.tolist() == (list(range(total)) if number == total else wanted.tolist())


def test_frames_of_a_video_are_pictures_with_a_number():
    file = {"size": {"height": TILE, "width": TILE}}
    ours = InternVLVideoProcessor(file, config_of(), Placeholder(23, "<video>", 23, "<video>"), TOKENIZER)
    frames = np.random.default_rng(0).integers(0, 256, (3, 30, 50, 3), dtype=np.uint8)
    clip = Clip(frames, (0, 1, 2), None, 3)
    assert [group.tokens for group in ours.groups(clip)] == [9, 9, 9]
    said = ours.expansion(clip)
    one = f"<img>{'<IMG_CONTEXT>' * 9}</img>"
    assert said.text == f"Frame1: {one}\nFrame2: {one}\nFrame3: {one}"
    assert said.ids[:10] == (*map(ord, "Frame1: "), 20, 22) and said.ids.count(22) == 27
    made = ours.prepare(clip, ours.groups(clip)[1])
    (picture,) = read_images([Image.fromarray(frames[1])], ImageSources())
    wanted = GotOcr2ImageProcessorPil(**file)(Image.fromarray(picture.pixels), return_tensors="np")["pixel_values"]
    numbers = made.arrays["pixels"][0].reshape(3, -1) * made.arrays["scale"][:, None] + made.arrays["shift"][:, None]
    np.testing.assert_allclose(numbers.reshape(3, 4, 4), wanted[0, :, :4, :4], atol=2e-5)


def test_files_that_do_not_fit_are_refused(tmp_path):
    _, ours = both(tmp_path, {})
    with pytest.raises(ValueError, match="image_seq_length=9, and a tile of 24 pixels a side has 36 tokens"):
        InternVLImageProcessor.open(tmp_path, config_of(downsample_ratio=1.0), TOKENIZER)
    with pytest.raises(ValueError, match=r"no token '<img>', which stands around a picture \(start_image_token\)"):
        InternVLImageProcessor.open(
            tmp_path, config_of(), SimpleNamespace(convert_ids_to_tokens=str, convert_tokens_to_ids={}.get)
        )
    with pytest.raises(ValueError, match="a request may lower this bound"):
        ours.with_settings({"max_patches": 13}, of_request=True)
    with pytest.raises(ValueError, match="no square whose side is a multiple of 8"):
        ours.with_settings({"size": {"height": 20, "width": 24}}, of_request=True)


def test_bounds_on_tiles_that_contradict_each_other_are_refused(tmp_path):
    _, ours = both(tmp_path, {})
    for wrong in ({"min_patches": 0}, {"min_patches": -3}, {"max_patches": 0}, {"min_patches": 13}):
        with pytest.raises(ValueError, match="must be above 0, and at most max_patches="):
            ours.with_settings(wrong, of_request=False)
    videos = InternVLVideoProcessor({"size": {"height": TILE, "width": TILE}}, config_of(), ours.placeholder, TOKENIZER)
    assert videos.most_features == 10

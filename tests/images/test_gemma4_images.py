"""Patches of Gemma 4 are those of transformers' processor on Pillow, for pictures of any size."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from thorough import examples
from transformers import Gemma4Config, Gemma4ImageProcessorPil, Gemma4Processor

from jpaged.images import ImageSources, read_images
from jpaged.images.clips import Clip
from jpaged.images.gemma4 import Gemma4ImageProcessor, Gemma4VideoProcessor
from jpaged.images.prompts import Placeholder

CHANGES = [
    {},
    {"patch_size": 7, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    {"patch_size": 5, "pooling_kernel_size": 1, "max_soft_tokens": 140, "do_normalize": True, "image_mean": [0.5] * 3},
    {"do_rescale": False, "resample": 2, "max_soft_tokens": 70},
    {"rescale_factor": 1 / 127.5, "do_normalize": True, "image_std": [0.5, 2.0, 0.25], "max_soft_tokens": 70},
]


def config_of(changes):
    own = {name: changes[name] for name in ("patch_size", "pooling_kernel_size") if name in changes}
    return Gemma4Config(vision_config=own, image_token_id=7)


def both(folder, changes):
    theirs = Gemma4ImageProcessorPil(**changes)
    theirs.save_pretrained(folder)
    return theirs, Gemma4ImageProcessor.open(folder, config_of(changes), None)


def scaled(arrays):
    each = arrays["pixels"].reshape(len(arrays["pixels"]), 3, -1).astype(np.float32)
    return each * arrays["scale"][:, None] + arrays["shift"][:, None]


@pytest.mark.parametrize("changes", CHANGES)
def test_patches_are_those_of_transformers(tmp_path, changes):
    theirs, ours = both(tmp_path, changes)

    @settings(max_examples=examples(8), deadline=None)
    @given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 99))
    def check(height, width, seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        (picture,) = read_images([image], ImageSources())
        wanted = theirs([image], return_tensors="np")
        (count,) = np.asarray(wanted["num_soft_tokens_per_image"]).ravel().tolist()
        made = ours.prepare(picture, alone=True)
        assert made.features == count == ours.tokens(picture.size, alone=False)
        assert made.arrays["pixels"].dtype == np.uint8
        patches = count * theirs.pooling_kernel_size**2
        assert made.arrays["frames"].tolist() == [patches]
        places = wanted["image_position_ids"][0, :patches]
        rows_of = {tuple(place): row for row, place in enumerate(places.tolist())}
        order = [rows_of[tuple(place)] for place in made.arrays["places"].tolist()]
        assert sorted(order) == list(range(patches))
        theirs_by_square = wanted["pixel_values"][0, order].reshape(patches, -1, 3).swapaxes(1, 2)
        np.testing.assert_allclose(scaled(made.arrays), theirs_by_square, rtol=1e-5, atol=2e-5)
        squares = places[order].reshape(count, -1, 2) // theirs.pooling_kernel_size
        assert (squares == squares[:, :1]).all(), "the patches of a feature follow one another"
        columns = places[:, 0].max() // theirs.pooling_kernel_size + 1
        assert (squares[:, 0] @ [1, columns]).tolist() == list(range(count)), "features are in rows"

    check()


def test_requests_lower_the_budget_and_do_not_raise_it(tmp_path):
    _, ours = both(tmp_path, {})
    assert ours.tokens((480, 640), alone=True) == 14 * 19
    assert ours.with_settings({"max_soft_tokens": 70}, of_request=True).tokens((480, 640), alone=True) == 7 * 9
    assert ours.with_settings({"max_soft_tokens": 1120}, of_request=False).tokens((480, 640), alone=True) == 28 * 38
    picture, *_ = read_images([Image.new("RGB", (30, 40))], ImageSources())
    less = ours.with_settings({"max_soft_tokens": 140}, of_request=True)
    assert less.digest(picture, alone=True) != ours.digest(picture, alone=True)
    with pytest.raises(ValueError, match="which is 280, not raise it"):
        ours.with_settings({"max_soft_tokens": 560}, of_request=True)
    with pytest.raises(ValueError, match="max_soft_tokens=100 is none of 70, 140, 280, 560, 1120"):
        ours.with_settings({"max_soft_tokens": 100}, of_request=True)
    with pytest.raises(ValueError, match="do_resize=False, with which max_soft_tokens bounds nothing"):
        ours.with_settings({"do_resize": False}, of_request=True)


def test_files_that_do_not_fit_are_refused(tmp_path):
    Gemma4ImageProcessorPil(patch_size=14).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"pooling_kernel_size are \(14, 3\), and vision_config's \(16, 3\)"):
        Gemma4ImageProcessor.open(tmp_path, config_of({}), None)
    (file,) = tmp_path.glob("*.json")
    file.write_text(json.dumps({"max_soft_tokens": 71}))
    with pytest.raises(ValueError, match="max_soft_tokens=71"):
        Gemma4ImageProcessor.open(tmp_path, config_of({}), None)


def test_without_resizing_a_picture_fits_or_is_refused(tmp_path):
    _, ours = both(tmp_path, {"do_resize": False})
    assert ours.tokens((48, 96), alone=True) == 2
    with pytest.raises(ValueError, match="96 x 47 pixels are no multiples of 48"):
        ours.tokens((47, 96), alone=True)
    config = Gemma4Config(vision_config={"position_embedding_size": 5}, image_token_id=7)
    few = Gemma4ImageProcessor.open(tmp_path, config, None)
    with pytest.raises(ValueError, match="6 patches long, the model knows 5 positions"):
        few.tokens((48, 96), alone=True)


def test_frames_of_videos_have_a_budget_of_their_own():
    placeholder = Placeholder(8, "<video>", 8, "<video>", modality="video")
    config = config_of({})
    clip = Clip(np.zeros((3, 480, 640, 3), np.uint8), (0, 30, 1800), 24.0, 2000)
    for settings_, tokens in (({}, 7 * 9), ({"max_soft_tokens": 140}, 10 * 13)):
        processor = Gemma4VideoProcessor(settings_, config, placeholder)
        assert processor.sampling.num_frames == 32
        groups = processor.groups(clip)
        assert [(group.first, group.last, group.tokens) for group in groups] == [(n, n + 1, tokens) for n in range(3)]
        assert processor.prepare(clip, groups[1]).features == tokens
    assert [group.tokens for group in processor.groups(clip)] == [130] * 3
    with pytest.raises(ValueError, match="the model has no tokenizer for them"):
        processor.expansion(clip)


class Letters:
    """A tokenizer whose ids are those of characters."""

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]

    def convert_ids_to_tokens(self, ids):
        return [chr(number) for number in ids]


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=4, unique=True), st.none() | st.floats(0.1, 120))
@settings(max_examples=examples(30), deadline=None)
def test_frames_come_after_their_times_as_transformers_writes_them(indices, fps):
    indices = sorted(indices)
    config = Gemma4Config(vision_config={}, image_token_id=7, boi_token_id=ord("<"), eoi_token_id=ord(">"))
    processor = Gemma4VideoProcessor({}, config, Placeholder(ord("v"), "v", ord("v"), "v"), Letters())
    clip = Clip(np.zeros((len(indices), 48, 96, 3), np.uint8), tuple(indices), fps, 200_001)
    made = processor.expansion(clip)
    known = SimpleNamespace(fps=fps, timestamps=[index / (fps or 24) for index in indices])
    mine = SimpleNamespace(boi_token="<", eoi_token=">", video_token="v")
    (tokens,) = {group.tokens for group in processor.groups(clip)}
    inputs = {"num_soft_tokens_per_video": [tokens], "video_metadata": [known]}
    wanted = Gemma4Processor.replace_video_token(mine, inputs, 0)
    assert made.text == wanted == "".join(map(chr, made.ids))


def test_pictures_and_frames_have_at_most_the_budget(tmp_path):
    _, ours = both(tmp_path, {})
    videos = Gemma4VideoProcessor({}, config_of({}), Placeholder(8, "<video>", 8, "<video>"))
    assert (ours.most_features, videos.most_features) == (280, 70)
    assert ours.with_settings({"do_resize": False}, of_request=False).most_features is None

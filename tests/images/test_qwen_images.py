"""Patches of Qwen's families are those of transformers' processor on Pillow, for pictures of any size."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from thorough import examples
from transformers import (
    Glm4vImageProcessorPil,
    PaddleOCRVLImageProcessorPil,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from jpaged.images import Clip, ImageSources, read_images
from jpaged.images.glm import GlmImageProcessor
from jpaged.images.paddleocr import PaddleOCRImageProcessor
from jpaged.images.prompts import Expansion, Placeholder, fill_ids, fill_text
from jpaged.images.qwen import QwenImageProcessor, places_of, windows_of
from jpaged.images.qwen_videos import Qwen2VideoProcessor, Qwen3VideoProcessor
from jpaged.scheduling.axis_positions import AxisPositions
from jpaged.scheduling.inputs import PromptItem

CHANGES = [
    {},
    {"size": {"shortest_edge": 4096, "longest_edge": 16384}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    {"min_pixels": 784, "max_pixels": 12544, "patch_size": 7},
    {"patch_size": 16, "merge_size": 3, "temporal_patch_size": 1, "do_normalize": False},
    {"do_rescale": False, "resample": 2},
    {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3},
]


def config_of(changes):
    own = {name: changes.get(name, 14 if name == "patch_size" else 2) for name in ("patch_size", "temporal_patch_size")}
    own["spatial_merge_size"] = changes.get("merge_size", 2)
    return Qwen3VLConfig(vision_config=own, image_token_id=7)


KINDS = {
    "qwen": (Qwen2VLImageProcessorPil, QwenImageProcessor),
    "glm": (Glm4vImageProcessorPil, GlmImageProcessor),
    "paddleocr": (PaddleOCRVLImageProcessorPil, PaddleOCRImageProcessor),
}
"""Transformers' processors and ours."""


def both(folder, changes, kind="qwen"):
    made, own = KINDS[kind]
    theirs = made(**changes)
    theirs.save_pretrained(folder)
    return theirs, own.open(folder, config_of(changes), None)


def scaled(arrays):
    each = arrays["pixels"].reshape(len(arrays["pixels"]), 3, -1).astype(np.float32)
    return (each * arrays["scale"][:, None] + arrays["shift"][:, None]).reshape(len(each), -1)


OTHERS = [
    ("glm", {}),
    ("glm", {"patch_size": 7, "size": {"shortest_edge": 4096, "longest_edge": 65536}, "resample": 2}),
    ("glm", {"patch_size": 4, "merge_size": 3, "temporal_patch_size": 4}),
    ("paddleocr", {"temporal_patch_size": 1}),
    ("paddleocr", {"temporal_patch_size": 1, "patch_size": 8, "min_pixels": 256, "max_pixels": 25600}),
]


@pytest.mark.parametrize(("kind", "changes"), [*(("qwen", each) for each in CHANGES), *OTHERS])
def test_patches_are_those_of_transformers(tmp_path, kind, changes):
    theirs, ours = both(tmp_path, changes, kind)

    @settings(max_examples=examples(12), deadline=None)
    @given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 99))
    def check(height, width, seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        (picture,) = read_images([image], ImageSources())
        try:
            wanted = theirs([image], return_tensors="np")
        except ValueError:
            with pytest.raises(ValueError, match="at most 200 times"):
                ours.tokens(picture.size, alone=True)
            return
        made = ours.prepare(picture, alone=True)
        values = wanted["pixel_values"].reshape(len(wanted["pixel_values"]), -1)
        if kind == "paddleocr":  # row by row, where ours are square by square
            columns, places = wanted["image_grid_thw"][0, 2], made.arrays["places"].astype(int)
            values = values[places[:, 0] * columns + places[:, 1]]
        np.testing.assert_allclose(scaled(made.arrays), values, rtol=1e-5, atol=2e-5)
        (grid,) = wanted["image_grid_thw"].tolist()
        merge = theirs.merge_size
        assert made.features == np.prod(grid) // merge**2 == ours.tokens(picture.size, alone=False)
        assert made.arrays["frames"].tolist() == [grid[1] * grid[2]] and made.advance == max(grid) // merge
        assert made.arrays["pixels"].dtype == np.uint8

    check()


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.integers(1, 5))
@settings(max_examples=examples(60), deadline=None)
def test_places_and_windows_are_those_of_transformers(time, rows, columns, merge, window):
    grid = time, rows * merge, columns * merge
    places = places_of(grid, merge)
    np.testing.assert_array_equal(places[:, :2], get_vision_position_ids(torch.tensor([grid]), merge).numpy())
    assert (places[:, 2:] == grid[1:]).all()
    order, lengths = windows_of(grid, merge, window)
    wanted, starts = get_vision_window_index(torch.tensor([grid]), merge, window * merge, 1)
    np.testing.assert_array_equal(order, wanted.numpy())
    np.testing.assert_array_equal(np.cumsum(lengths) * merge**2, starts.numpy()[1:])


def test_a_digest_names_the_settings(tmp_path):
    picture, *_ = read_images([Image.new("RGB", (30, 40))], ImageSources())
    digests = set()
    for number, changes in enumerate(CHANGES):
        _, ours = both(tmp_path / str(number), changes)
        digests.add(ours.digest(picture, alone=True))
    assert len(digests) == len(CHANGES)


def test_files_that_do_not_fit_are_refused(tmp_path):
    Qwen2VLImageProcessorPil(patch_size=14).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the image processor has .*, and vision_config \(16, 2, 2\)"):
        QwenImageProcessor.open(tmp_path, config_of({"patch_size": 16}), None)
    (file,) = tmp_path.glob("*.json")
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"size": {"height": 3, "width": 3}}))
    with pytest.raises(ValueError, match="lacks 'shortest_edge'"):
        QwenImageProcessor.open(tmp_path, config_of({}), None)
    file.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        QwenImageProcessor.open(tmp_path, config_of({}), None)
    file.unlink()
    with pytest.raises(ValueError, match="says how images are prepared"):
        QwenImageProcessor.open(tmp_path, config_of({}), None)


def test_without_resizing_a_picture_fits_or_is_refused(tmp_path):
    _, ours = both(tmp_path, {"do_resize": False})
    assert ours.tokens((56, 84), alone=True) == 6
    with pytest.raises(ValueError, match="84 x 57 pixels are no multiples of 28"):
        ours.tokens((57, 84), alone=True)


@given(st.lists(st.sampled_from(["[", "]", "v", "a", "[v]"]), max_size=12))
@settings(max_examples=examples(200), deadline=None)
def test_the_marks_around_a_video_give_way_to_those_of_its_frames(pieces):
    """As transformers 4.57 and vLLM do it, where a chat template has put them there; others stay."""
    text = "".join(pieces)
    number = text.count("v")
    placeholder = Placeholder(ord("v"), "v", ord("v"), "v", marks=(ord("["), ord("]")), marks_text=("[", "]"))
    expansions = [Expansion(f"<{i}>[vv]", tuple(map(ord, f"<{i}>[vv]"))) for i in range(number)]
    filled = fill_text(text, placeholder, expansions)
    wanted = text.replace("[v]", "V").replace("v", "V")
    for expansion in expansions:
        wanted = wanted.replace("V", expansion.text, 1)
    assert filled == wanted
    assert "".join(map(chr, fill_ids(list(map(ord, text)), placeholder, expansions))) == wanted


@settings(max_examples=examples(300), deadline=None)
@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.integers(1, 40),
    st.integers(0, 200),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([QwenImageProcessor, GlmImageProcessor, PaddleOCRImageProcessor]),
)
def test_no_picture_has_more_tokens_than_the_largest(height, width, least, more, merge, kind):
    square = 4 * merge
    fields = {
        "patch_size": 4,
        "merge_size": merge,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": least * square**2, "longest_edge": (least + more) * square**2},
    }
    ours = kind(fields, config_of(fields), None)
    many = kind({**fields, "do_resize": False}, config_of(fields), None)
    assert many.most_features is None
    try:
        found = ours.tokens((height, width), alone=True)
    except ValueError:
        return
    assert found <= ours.most_features
    for videos in (Qwen2VideoProcessor, Qwen3VideoProcessor):
        frames = videos(fields, config_of(fields), Placeholder(8, "v", 8, "v"))
        for number in (1, 2, 3, 5):
            clip = Clip(np.zeros((number, height, width, 3), np.uint8), tuple(range(number)), 1.0, number)
            assert max(group.tokens for group in frames.groups(clip)) <= frames.most_features


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 60), st.integers(1, 60), st.floats(0.1, 60), st.integers(1, 5)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, 1, 2, 4, 25]),
    st.booleans(),
)
def test_places_of_videos_and_of_text_after_them_are_those_of_transformers(videos, per_second, starts_with_text):
    """Each video has frames, a height, a width, a rate, and tokens of text after it; Qwen2-VL counts no seconds."""
    fields = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 64 * 12}}
    vision = {"spatial_merge_size": 2, "patch_size": 4, "temporal_patch_size": 2}
    kind, config = Qwen2VLModel, Qwen2VLConfig(vision_config=vision)
    if per_second is not None:
        config = Qwen2_5_VLConfig(vision_config=vision | {"tokens_per_second": per_second})
        kind = Qwen2_5_VLModel
    ours = Qwen2VideoProcessor(fields, config, Placeholder(8, "v", 8, "v"))
    items, kinds, grids, seconds = [], [0] * starts_with_text, [], []
    for number, height, width, rate, text in videos:
        clip = Clip(np.zeros((number, height, width, 3), np.uint8), tuple(range(number)), rate, number)
        for group in ours.groups(clip):
            made = ours.prepare(clip, group)
            items.append(
                PromptItem(
                    len(kinds), group.tokens, b"", group.tokens, {}, False, offsets=made.offsets, advance=made.advance
                )
            )
            kinds += [2] * group.tokens
        rows, columns = (side // 4 for side in ours.size(clip))
        grids.append((len(ours.groups(clip)), rows, columns))
        seconds.append(2 / rate)
        kinds += [0] * text
    theirs = SimpleNamespace(config=config, get_vision_position_ids=partial(kind.get_vision_position_ids, None))
    more = {} if per_second is None else {"second_per_grid_ts": torch.tensor(seconds)}
    kinds = torch.tensor([kinds])
    places, _ = kind.get_rope_index(theirs, kinds, kinds, video_grid_thw=torch.tensor(grids), **more)
    assert AxisPositions(items).of(0, kinds.shape[1]).T.tolist() == places[:, 0].tolist()


def test_frames_that_lie_years_apart_are_refused_as_their_positions_have_32_bits():
    vision = {"spatial_merge_size": 2, "patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": 4}
    ours = Qwen2VideoProcessor({}, Qwen2_5_VLConfig(vision_config=vision), Placeholder(8, "v", 8, "v"))
    frames, few = np.zeros((4, 28, 28, 3), np.uint8), (0, 1, 2, 10**9)
    assert len(ours.groups(Clip(frames, few, 30.0, 10**9 + 1))) == 2
    with pytest.raises(ValueError, match=r"of 1000000001 at fps=1e-06, has its last ones at place .* limit is 1073741"):
        ours.groups(Clip(frames, few, 1e-6, 10**9 + 1))


def test_errors_of_paddleocr_name_the_size_of_the_picture():
    settings = PaddleOCRImageProcessor.patches(14, 1, 2, 147456, 2359296, 3, True, (1.0,) * 3, (0.0,) * 3)
    with pytest.raises(ValueError, match=r"^201 x 1 pixels: the longer side may be at most 200 times"):
        settings.resized(1, 201)

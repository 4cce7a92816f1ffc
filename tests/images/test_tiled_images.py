"""Tiles of LFM2-VL and Llama 4. Sizes are those of transformers' processors with torchvision, which the tests lack."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from jpaged.images import ImageSources, Placeholder, find_spans, own_tokens, read_images
from jpaged.images.lfm2 import Lfm2ImageProcessor, Marks
from jpaged.images.llama4 import _MARKS, Llama4ImageProcessor

LFM2 = {
    (400, 500): ((1, 1), (384, 512)),
    (1500, 1000): ((2, 3), (608, 416)),
    (1, 1500): ((1, 1), (32, 9920)),
    (900, 1440): ((3, 2), (384, 640)),
}
"""Height and width of a picture: columns and rows of its tiles, and the size of the whole."""
LLAMA4 = {
    (400, 500): ((2, 2), (400, 500)),
    (336, 336): ((1, 1), (336, 336)),
    (900, 100): ((3, 1), (900, 100)),
    (20, 10): ((1, 1), (336, 168)),
    (3000, 2000): ((5, 3), (1512, 1008)),
}
"""Height and width of a picture: rows and columns of its tiles, and its size in them."""


def lfm2(**more):
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [len(text)])
    vision = SimpleNamespace(patch_size=16, num_channels=3)
    config = SimpleNamespace(model_type="lfm2_vl", vision_config=vision, downsample_factor=2)
    marks = Marks(("<|image_start|>", "<|image_end|>"), "<|img_thumbnail|>")
    return Lfm2ImageProcessor(more, config, Placeholder(7, "<image>", 7, "<image>"), marks, tokenizer)


def llama4(**more):
    vision = SimpleNamespace(patch_size=14, num_channels=3, image_size=336, pixel_shuffle_ratio=0.5)
    config = SimpleNamespace(model_type="llama4", vision_config=vision, image_token_id=1)
    return Llama4ImageProcessor(more, config, {name: (id_, f"<{name}>") for id_, name in enumerate(_MARKS)})


def prepared(processor, size):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    (picture,) = read_images([Image.fromarray(pixels)], ImageSources())
    made, said = processor.prepare(picture, alone=True), processor.expansion(size, alone=True)
    token = processor.placeholder.image_token
    ((start, length),) = find_spans(said.ids, processor.placeholder, [own_tokens(processor.placeholder, said)])
    run = said.ids[start : start + length]
    assert (made.takes >= 0).tolist() == [each == token for each in run]
    assert len(made.takes[made.takes >= 0]) == processor.tokens(size, alone=True)
    return made, said


@pytest.mark.parametrize("size", LFM2)
def test_pictures_of_lfm2_are_cut_as_transformers_does(size):
    ours = lfm2()
    assert (ours.settings.grid(*size), ours.settings.resized(*size)) == LFM2[size]
    made, said = prepared(ours, size)
    (columns, rows), (height, width) = LFM2[size]
    tiles = [1024] * (columns * rows) if columns * rows > 1 else []
    assert made.arrays["parts"].tolist() == [*tiles, height // 16 * (width // 16)]
    marks = said.text.replace("<image>", "")
    inner = "".join(f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns))
    assert marks == f"<|image_start|>{inner + '<|img_thumbnail|>' if tiles else ''}<|image_end|>"


def test_a_request_makes_no_more_tiles_of_lfm2():
    ours = lfm2()
    assert ours.with_settings({"do_image_splitting": False}, of_request=True).tokens((1500, 1000), alone=True) == 247
    for raised in ({"tile_size": 1024}, {"max_tiles": 11}, {"min_image_tokens": 65}, {"max_pixels_tolerance": 3.0}):
        with pytest.raises(ValueError, match="a request may lower"):
            ours.with_settings(raised, of_request=True)
    with pytest.raises(ValueError, match="a request may lower"):
        lfm2(do_image_splitting=False).with_settings({"do_image_splitting": True}, of_request=True)
    with pytest.raises(ValueError, match="min_tiles=3 must be above 0, and at most"):
        ours.with_settings({"min_tiles": 3, "max_tiles": 2}, of_request=False)


@pytest.mark.parametrize("size", LLAMA4)
def test_pictures_of_llama_4_are_laid_into_tiles_as_transformers_does(size):
    ours = llama4()
    assert (ours.settings.grid(size), ours.settings.within(size)) == LLAMA4[size]
    made, said = prepared(ours, size)
    rows, columns = LLAMA4[size][0]
    tiles = rows * columns + (rows * columns > 1)
    assert made.arrays["tiles"].tolist() == [577, 3] * tiles and made.features == tiles * 145 <= ours.most_features
    row = "<tile_x_separator>" * (columns - 1) + "<tile_y_separator>"
    marks = said.text.replace("<patch>", "")
    assert marks == f"<image_start>{row * rows if tiles > 1 else ''}<image><image_end>"


def test_settings_of_llama_4_that_do_not_fit_are_refused():
    ours = llama4()
    assert ours.with_settings({"max_patches": 1}, of_request=True).tokens((900, 900), alone=True) == 144
    with pytest.raises(ValueError, match="a request may lower this bound"):
        ours.with_settings({"max_patches": 17}, of_request=True)
    with pytest.raises(ValueError, match="is not image_size=336"):
        ours.with_settings({"size": {"height": 28, "width": 28}}, of_request=True)
    with pytest.raises(ValueError, match="do_normalize=False is not supported"):
        llama4(do_normalize=False)
    with pytest.raises(ValueError, match="max_patches=0 must be above 0"):
        ours.with_settings({"max_patches": 0}, of_request=False)


@pytest.mark.parametrize("changes", [{}, {"do_image_splitting": False}, {"min_image_tokens": 256}])
def test_no_picture_of_lfm2_has_more_features_than_it_says(changes):
    ours = lfm2(**changes)
    sizes = [(high, wide) for high in (1, 16, 33, 500, 3000) for wide in (1, 40, 700, 3000, 20000)]
    found = []
    for size in sizes:
        try:
            found.append(ours.tokens(size, alone=True))
        except ValueError as error:
            assert "too oblong" in str(error) and max(size) > 200 * min(size)
    assert len(found) > 20 and max(found) <= ours.most_features
    with pytest.raises(ValueError, match="20000 x 1 pixels are too oblong"):
        ours.tokens((1, 20000), alone=True)


def test_a_request_makes_no_more_tiles_of_llama_4():
    with pytest.raises(ValueError, match="resize_to_max_canvas=True, which makes more tiles"):
        llama4().with_settings({"resize_to_max_canvas": True}, of_request=True)
    assert llama4().with_settings({"resize_to_max_canvas": True}, of_request=False).settings.grows
    with pytest.raises(ValueError, match=r"rescale_factor=1e.38 make too large pixels"):
        llama4().with_settings({"rescale_factor": 1e38}, of_request=True)

"""Patches and tokens of Pixtral's pictures are those of transformers' processors on Pillow, whatever their size."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from thorough import examples
from transformers import Mistral3Config, PixtralImageProcessorPil

from jpaged.images import ImageSources, find_spans, own_tokens, read_images
from jpaged.images.pixtral import PixtralImageProcessor

CHANGES = [
    {},
    {"size": {"longest_edge": 100}, "image_mean": [0.5] * 3, "image_std": [0.3] * 3, "patch": 7, "merge": 3},
    {"size": {"height": 60, "width": 130}, "resample": 2, "do_normalize": False, "merge": 1},
    {"size": {"longest_edge": 64}, "do_rescale": False},
]


class Words:
    """A tokenizer that knows three words."""

    known = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    unk_token_id = None

    def convert_tokens_to_ids(self, text):
        return 10 + self.known.index(text) if text in self.known else None

    def convert_ids_to_tokens(self, token):
        return self.known[token - 10]


def both(folder, changes):
    changes = {"patch": 14, "merge": 2, **changes}
    patch, merge = changes.pop("patch"), changes.pop("merge")
    theirs = PixtralImageProcessorPil(patch_size={"height": patch, "width": patch}, **changes)
    theirs.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"patch_size": patch, "spatial_merge_size": merge}))
    config = Mistral3Config(vision_config={"model_type": "pixtral", "patch_size": patch}, spatial_merge_size=merge)
    return theirs, PixtralImageProcessor.open(folder, config, Words()), patch, merge


@pytest.mark.parametrize("changes", CHANGES)
def test_patches_and_rows_are_those_of_transformers(tmp_path, changes):
    theirs, ours, patch, merge = both(tmp_path, changes)
    square = patch * merge

    @settings(max_examples=examples(8), deadline=None)
    @given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 99))
    def check(height, width, seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        (picture,) = read_images([image := Image.fromarray(pixels)], ImageSources())
        most = ours.settings.most
        if min(height, width) < max(height / most[0], width / most[1]):
            with pytest.raises(ValueError, match="too oblong"):
                ours.tokens(picture.size, alone=True)
            return
        wanted = theirs([image], patch_size={"height": square, "width": square}, return_tensors="np")
        high, wide = wanted["image_sizes"][0]
        made, rows, columns = ours.prepare(picture, alone=True), high // square, wide // square
        assert made.features == rows * columns == ours.tokens(picture.size, alone=False) <= ours.most_features
        each = made.arrays["pixels"].reshape(made.features * merge**2, 3, -1).astype(np.float32)
        each = each * made.arrays["scale"][:, None] + made.arrays["shift"][:, None]
        whole = np.empty((3, high, wide), np.float32)
        for numbers, (row, column, *_) in zip(each, made.arrays["places"], strict=True):
            whole[:, row * patch :, column * patch :][:, :patch, :patch] = numbers.reshape(3, patch, patch)
        np.testing.assert_allclose(whole, wanted["pixel_values"][0], rtol=1e-5, atol=2e-5)
        squares = made.arrays["places"][:: merge**2, :2] // merge
        np.testing.assert_array_equal(squares, np.indices((rows, columns)).reshape(2, -1).T)

        said = ours.expansion(picture.size, alone=True)
        text = ("[IMG]" * columns + "[IMG_BREAK]") * rows  # transformers' processor itself needs torchvision
        assert said.text == text.removesuffix("[IMG_BREAK]") + "[IMG_END]"
        ids = [10 + Words.known.index(f"[{word}]") for word in said.text[1:-1].split("][")]
        assert list(said.ids) == ids
        ((start, length),) = find_spans([1, 2, *ids, 3], ours.placeholder, [own_tokens(ours.placeholder, said)])
        assert start == 2 and length == len(ids) - 1 == len(made.takes)
        assert [token == 10 for token in ids[:-1]] == (made.takes >= 0).tolist()
        assert made.takes[made.takes >= 0].tolist() == list(range(made.features))

    check()


def test_rows_that_end_otherwise_are_refused(tmp_path):
    _, ours, *_ = both(tmp_path, {"merge": 1})
    item = own_tokens(ours.placeholder, ours.expansion((28, 42), alone=True))
    assert item == (10, 10, 10, 11, 10, 10, 10)
    assert find_spans([5, *item, 12], ours.placeholder, [item]) == [(1, 7)]
    with pytest.raises(ValueError, match="with the 1 others that belong among them"):
        find_spans([*[10] * 6, 12], ours.placeholder, [item])
    with pytest.raises(ValueError, match="other tokens stand among the 6 tokens of image 1"):
        find_spans([10, 10, 10, 7, 10, 10, 10], ours.placeholder, [item])


def test_files_that_do_not_fit_are_refused(tmp_path):
    _, ours, *_ = both(tmp_path, {})
    config = Mistral3Config(vision_config={"model_type": "pixtral", "patch_size": 16})
    with pytest.raises(ValueError, match=r"has patch_size=14 and spatial_merge_size=2, and .* 16 and 2"):
        PixtralImageProcessor.open(tmp_path, config, Words())
    with pytest.raises(ValueError, match="there is no tokenizer that knows them"):
        both(tmp_path, {})[1].open(tmp_path, Mistral3Config(vision_config={"patch_size": 14}), None)
    with pytest.raises(ValueError, match="a request may lower this bound"):
        ours.with_settings({"size": {"longest_edge": 2000}}, of_request=True)
    assert ours.with_settings({"size": {"longest_edge": 100}}, of_request=True).tokens((500, 500), alone=True) == 16
    with pytest.raises(ValueError, match="a request may not"):
        ours.with_settings({"do_resize": False}, of_request=True)
    plain = ours.with_settings({"do_resize": False}, of_request=False)
    assert plain.tokens((56, 84), alone=True) == 6
    with pytest.raises(ValueError, match="84 x 57 pixels are no multiples of 28"):
        plain.tokens((57, 84), alone=True)

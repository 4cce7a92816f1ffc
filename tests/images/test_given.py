"""Features that a caller has encoded are placed by their grids, and refused where they do not fit them."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from jpaged.images.given import GIVEN_FEATURES, GivenLayout

LAYOUT = GivenLayout(width=6, merge=2)


def given(grids, features=None, **more):
    count = sum(LAYOUT.tokens(tuple(grid)) for grid in np.atleast_2d(grids).tolist()) if features is None else features
    numbers = np.arange(count * 6, dtype=np.float64).reshape(count, 6)
    return {"image_embeds": numbers, "image_grid_thw": grids} | more


def test_each_image_gets_the_features_of_its_grid():
    one, other = LAYOUT.read(given([[1, 4, 6], [2, 2, 2]]))
    assert one.features.shape == (6, 6) and other.features.shape == (2, 6)
    assert one.features.dtype == np.float32 and other.features[0, 0] == 36
    (alone,) = LAYOUT.read(given([1, 4, 6]))
    assert alone.grid == (1, 4, 6)


def test_tokens_lie_row_by_row_and_the_longer_side_moves_what_follows():
    assert LAYOUT.offsets((1, 4, 6)).tolist() == [[0, y, x] for y in range(2) for x in range(3)]
    assert LAYOUT.offsets((2, 2, 2)).tolist() == [[0, 0, 0], [1, 0, 0]]
    assert LAYOUT.advance((1, 4, 6)) == 3 and LAYOUT.advance((5, 8, 2)) == 4


def test_names_are_those_of_numbers_and_grid():
    one, same, turned = (LAYOUT.read(given([grid]))[0] for grid in ([1, 4, 6], [1, 4, 6], [1, 6, 4]))
    assert one.digest == same.digest != turned.digest
    changed = given([1, 4, 6])
    changed["image_embeds"][3, 3] += 1
    assert LAYOUT.read(changed)[0].digest != one.digest


@pytest.mark.parametrize(("features", "places"), [(1, 256), (256, 256), (257, 512)])
def test_arrays_have_few_shapes(features, places):
    (image,) = LAYOUT.read(given([features, 2, 2]))
    array = image.arrays[GIVEN_FEATURES]
    assert array.shape == (places, 6) and not array[features:].any()


def test_without_grids_images_come_alone_stacked_or_listed():
    layout = GivenLayout(width=6, merge=None)
    one, several = np.ones((5, 6)), np.arange(36.0).reshape(2, 3, 6)
    for data, counts in [
        (one, [5]),
        (one.tolist(), [5]),
        (several, [3, 3]),
        ([one, several[0]], [5, 3]),
        ([several[0].tolist(), one.tolist()], [3, 5]),
        (npy(one), [5]),
        ([npy(one), npy(several[1])], [5, 3]),
    ]:
        images = layout.read({"image_embeds": data})
        assert [len(image.features) for image in images] == counts
        assert {(layout.advance(image.grid), image.grid) for image in images} == {(None, None)}
        assert layout.offsets(images[0].grid) is None
    for data, message in [
        ({"image_embeds": np.ones((5, 7))}, r"image 1 of 1: image_embeds of shape \[5, 7\] must be \[features, 6\]"),
        ({"image_embeds": [one, np.ones((0, 6))]}, "image 2 of 2"),
        ({"image_embeds": []}, "is empty|must be"),
        ({"image_embeds": one, "image_grid_thw": [1, 1, 5]}, "'image_embeds' alone, not image_embeds, image_grid_thw"),
        ({"image_embeds": one * np.nan}, "not finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            layout.read(data)


def npy(array, cut=None):
    """Return the file of an array in base64; of its numbers `cut` bytes are left."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    data = array.tobytes() if array.dtype != object else b""
    return base64.b64encode(file.getvalue() + data[:cut]).decode()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_files_in_base64_are_arrays(dtype):
    one = given([1, 4, 6])
    one["image_embeds"] = one["image_embeds"].astype(dtype)
    coded = {name: npy(np.asarray(value)) for name, value in one.items()}
    assert LAYOUT.read(coded)[0].digest == LAYOUT.read(one)[0].digest
    with pytest.raises(ValueError, match=r"has \[1\.0, 4\.0, 6\.0\]"):
        LAYOUT.read(coded | {"image_grid_thw": npy(np.array([1.0, 4, 6]))})


DEEP = base64.b64encode(np.lib.format.magic(1, 0) + (9001).to_bytes(2, "little") + b"-" * 9000 + b"1").decode()
BAD = {
    "lack 'image_embeds' and 'image_grid_thw'": {"image_embeds": None, "image_grid_thw": None},
    "not size": {"size": 3},
    r"of shape \[6, 5\] must be \[features, 6\]": {"image_embeds": np.zeros((6, 5))},
    r"of shape \[36\] must be": {"image_embeds": np.zeros(36)},
    "has 7 features, and .* takes 6": {"image_embeds": np.zeros((7, 6))},
    r"has \[1, 3, 8\]": {"image_grid_thw": [1, 3, 8]},
    r"has \[0, 4, 6\]": {"image_grid_thw": [0, 4, 6]},
    r"has \[4, 6\]": {"image_grid_thw": [4, 6]},
    r"has \[1\.5, 4\.0, 6\.0\]": {"image_grid_thw": [1.5, 4, 6]},
    "has 1 numbers that are not finite": {"image_embeds": np.where(np.arange(36) == 7, np.inf, 0).reshape(6, 6)},
    "image_embeds is no array of numbers, as a .npy file in base64": {"image_embeds": "AAAA"},
    r"image_embeds of shape \[9999999, 6\] has 8 bytes": {"image_embeds": npy(np.zeros((9999999, 6)), cut=8)},
    "image_embeds is no array of numbers, as a .npy file in base64: .*": {"image_embeds": DEEP},
    "image_embeds has the dtype object": {"image_embeds": npy(np.array([[{}] * 6] * 6, object))},
    "image_embeds is no array of numbers, as a .npy file in base64: Only base64": {"image_embeds": "*"},
    "no array of numbers": {"image_embeds": [["a"] * 6] * 6},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused(message):
    with pytest.raises(ValueError, match=message):
        LAYOUT.read(given([1, 4, 6], **BAD[message]))

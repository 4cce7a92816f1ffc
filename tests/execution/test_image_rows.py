"""Images in rows: each in one piece, none left out, lengths are few, and segments stay within their image."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged.execution.image_rows import ImageRows, Item, image_rows
from jpaged.model_api import RowArray, RowLayout, SegmentKind

MERGE = 4
LAYOUT = RowLayout(
    (RowArray("pixels", (3,), "uint8"),),
    (RowArray("scale", (1,), "float32"),),
    (SegmentKind("frames"), SegmentKind("windows", 8, 8)),
    MERGE,
)


def item(number, features, scale=1.0):
    patches = features * MERGE
    windows = [8] * (patches // 8) + [4] * (patches % 8 // 4)
    arrays = {
        "pixels": np.full((patches, 3), number, np.uint8),
        "scale": np.array([scale], np.float32),
        "frames": np.array([patches], np.int32),
        "windows": np.array(windows, np.int32),
    }
    return Item(arrays, np.arange(features, dtype=np.int32) + 1000 * number)


def nowhere(count):
    return np.full(count + 3, 2**31 - 1, np.int32)


IMAGES = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=30)
"""Features, and whether it is scaled as most are not."""


@given(IMAGES, st.integers(1, 50), st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_every_image_is_in_one_row_in_one_piece(images, longest, together):
    rows = ImageRows(LAYOUT, longest * MERGE)
    items = [item(number, features, 1 + other) for number, (features, other) in enumerate(images, start=1)]
    packed = rows.packed(items, together=together)
    assert [id(each) for row in packed for each in row] == [id(each) for each in items]
    assert together or all(len(row) == 1 for row in packed)
    for row in packed:
        (made,) = rows.joined([row], nowhere)
        pixels, starts = made.arrays["pixels"][0, :, 0], made.arrays["frames"][0]
        owners = [number for each in row for number in each.arrays["pixels"][:, 0]]
        assert pixels.tolist() == owners + [0] * (len(pixels) - len(owners))
        assert len(pixels) in rows.lengths or len(row) == 1
        assert starts[: len(row) + 1].tolist() == [0, *np.cumsum([len(each.rows) * MERGE for each in row])]
        assert (starts[len(row) :] == len(owners)).all()
        assert made.arrays["windows"][0, -1] == len(owners)
        assert made.arrays["scale"][0] == row[0].arrays["scale"] == row[-1].arrays["scale"]
        targets = [at for each in row for at in each.rows]
        assert made.rows[0, : len(targets)].tolist() == targets and (made.rows[0, len(targets) :] == 2**31 - 1).all()


@given(st.integers(1, 100_000), st.integers(1, 9))
@settings(max_examples=examples(100), deadline=None)
def test_lengths_are_few_and_an_eighth_apart(longest, merge):
    rows = ImageRows(RowLayout((), (), (), merge), longest * merge)
    lengths = rows.lengths
    assert len(lengths) <= 10 and lengths[-1] >= longest * merge and all(length % merge == 0 for length in lengths)
    assert max(np.diff(lengths)) <= lengths[-1] // 8
    assert all(rows.length(each) == each for each in lengths) and rows.length(1) == lengths[0]


@given(st.integers(1, 5000), st.floats(0, 6000), st.integers(1, 5000))
@settings(max_examples=examples(100), deadline=None)
def test_rows_of_images_on_both_sides_of_a_bound_are_known(longest, bound, patches):
    rows, patches = ImageRows(RowLayout((), (), (), 1), longest), min(patches, longest)
    known = rows.lengths_up_to(bound) if patches <= bound else rows.lengths_above(bound)
    assert rows.length(patches) in known


def test_replicas_have_rows_of_one_length():
    rows = ImageRows(LAYOUT, 40 * MERGE)
    made = rows.joined([[item(1, 3)], [], [item(2, 20), item(3, 5)]], nowhere)
    assert len({each.arrays["pixels"].shape for each in made}) == len({each.rows.shape for each in made}) == 1
    assert made[1].arrays["frames"].max() == 0 and made[1].rows.min() == 2**31 - 1


def test_each_replica_has_the_scale_of_its_own_images():
    rows = ImageRows(LAYOUT, 8 * MERGE)
    made = rows.joined([[item(1, 2, 3.0)], [item(2, 2, 7.0)], []], nowhere)
    assert [row.arrays["scale"].item() for row in made] == [3.0, 7.0, 3.0]


def test_more_segments_than_a_row_has_places_for_are_refused():
    rows = ImageRows(LAYOUT, 8 * MERGE)
    many = item(1, 2)
    many.arrays["frames"] = np.ones(100, np.int32)
    with pytest.raises(ValueError, match="an image has 100 frames, a row of 8 patches 64"):
        rows.joined([[many]], nowhere)


def test_examples_fill_rows():
    rows = ImageRows(LAYOUT, 40 * MERGE)
    for (arrays, features), length in zip(rows.examples(), rows.lengths, strict=True):
        made = rows.joined([[Item(arrays, np.arange(features, dtype=np.int32))]], nowhere)[0]
        assert made.arrays["pixels"].shape == (1, length, 3)
        assert made.arrays["pixels"].dtype == np.uint8


TILES = RowLayout(
    (RowArray("pixels", (), "int32"),),
    (),
    (SegmentKind("tiles", 5, 5),),
    1,
    features=(RowArray("takes", (2,), "int32", numbers_patches=True), RowArray("shares", (2,), "float32")),
    spare=3,
    unit=5,
    largest=20,
)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_features_take_the_patches_of_their_own_image(tiles, data):
    items = []
    for number, count in enumerate(tiles):
        patches, features = 5 * count, data.draw(st.integers(1, 8 * count))
        takes = np.array(
            data.draw(st.lists(st.integers(-1, patches - 1), min_size=2 * features, max_size=2 * features))
        )
        arrays = {
            "pixels": np.arange(patches, dtype=np.int32) + 100 * (number + 1),
            "tiles": np.full(count, 5, np.int32),
            "takes": takes.reshape(-1, 2).astype(np.int32),
            "shares": np.full((features, 2), number, np.float32),
        }
        items.append(Item(arrays, np.arange(features, dtype=np.int32) + 1000 * number))
    rows = ImageRows(TILES, TILES.largest)
    assert all(length % 5 == 0 for length in rows.lengths) and rows.lengths[-1] == 20
    for row in rows.packed(items, together=True):
        (made,) = rows.joined([row], nowhere)
        first = 0
        for each in row:
            last = first + len(each.rows)
            own, takes = each.arrays, made.arrays["takes"][0, first:last]
            assert (takes < 0).tolist() == (own["takes"] < 0).tolist()
            kept = takes >= 0
            assert (made.arrays["pixels"][0][takes][kept] == own["pixels"][own["takes"]][kept]).all()
            assert (made.arrays["shares"][0, first:last] == own["shares"]).all()
            assert (made.rows[0, first:last] == each.rows).all()
            first = last


def test_rows_have_room_for_several_images_of_one_size():
    rows = ImageRows(TILES, 4 * 5)
    assert rows.lengths == (5, 10, 15, 20)


@pytest.mark.parametrize(
    ("most_features", "max_model_len", "budget", "features"),
    [
        (1280, 32768, 512, 1280),  # the largest picture, whatever prompts may have
        (16384, 4096, 8192, 4096),  # but no prompt has more
        (None, 4096, 512, 4096),  # nothing bounds a picture
        (40, 256, 48, 40),
        (40, 256, 200, 200),  # five of the largest
        (64, 65536, 65536, 2048),  # more are no faster
        (5000, 65536, 65536, 5000),
    ],
)
def test_the_longest_row_holds_the_largest_picture_or_those_of_a_step(most_features, max_model_len, budget, features):
    model = SimpleNamespace(row_layout=LAYOUT, image_processor="", tensor_prefixes=())
    rows = image_rows(model, most_features, max_model_len=max_model_len, budget=budget)
    assert rows.longest == features * MERGE
    assert image_rows(SimpleNamespace(), most_features, max_model_len=max_model_len, budget=budget) is None

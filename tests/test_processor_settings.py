"""Settings of processors: what an engine may give, what a request may, and what is refused by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlavaOnevisionImageProcessorPil, Qwen2VLImageProcessorPil

from jpaged.processor_settings import processor_with, read_settings, replaced, split_settings

LLAVA = LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28})
QWEN = Qwen2VLImageProcessorPil()  # 3,136 to 1,003,520 pixels


def test_a_replaced_setting_is_the_processors_and_all_others_stay():
    made = processor_with(LLAVA, {"do_normalize": False, "image_mean": [0.1, 0.2, 0.3]}, of_request=True)
    changed = {name for name, value in made.to_dict().items() if value != LLAVA.to_dict()[name]}
    assert changed == {"do_normalize", "image_mean"} and made.image_mean == (0.1, 0.2, 0.3)
    assert processor_with(LLAVA, {}, of_request=True) is LLAVA


def test_numbers_of_pixels_and_parts_of_a_size_stand_for_the_whole_size():
    for settings in ({"max_pixels": 5000}, {"size": {"longest_edge": 5000}}):
        assert dict(processor_with(QWEN, settings, of_request=True).size) == {
            "shortest_edge": QWEN.size["shortest_edge"],
            "longest_edge": 5000,
        }
    made = processor_with(QWEN, {"min_pixels": 90_000}, of_request=True)
    assert made.size["shortest_edge"] == 90_000, "a request may ask for more of a small picture, within the bound"


@pytest.mark.parametrize("settings", [{"max_pixels": 10**7}, {"size": {"longest_edge": 10**7}}, {"min_pixels": 10**7}])
def test_a_request_raises_no_bound_and_an_engine_does(settings):
    with pytest.raises(ValueError, match=r"10000000: a request may lower this bound, which is 1003520"):
        processor_with(QWEN, settings, of_request=True)
    assert 10**7 in dict(processor_with(QWEN, settings, of_request=False).size).values()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sides": 4}, "has 'sides': the model's image processor has crop_size, "),
        ({"return_tensors": "pt"}, "has 'return_tensors'"),
        ({"do_resize": 1}, r"do_resize=1, which must be true or false"),
        ({"rescale_factor": True}, "rescale_factor=True, which must be a number"),
        ({"rescale_factor": 0}, "rescale_factor=0: pixels"),
        ({"image_std": [1, 0, 1]}, "pixels are divided by it"),
        ({"image_mean": "white"}, "image_mean='white', which must be a list"),
        ({"image_mean": [1, "a", 2]}, "must be a list of numbers"),
        ({"size": 4}, "size=4, which must be a mapping"),
        ({"size": {"height": -1}}, "whose height must be a positive number"),
        ({"size": {"height": 56}}, "height=56: a request may lower this bound, which is 28"),
        ({"resample": 56}, "resample=56, which must be the number of a filter of Pillow.s, 0 to 5"),
        ({"max_soft_tokens": 9}, "has 'max_soft_tokens'"),
    ],
)
def test_what_is_no_setting_or_of_another_type_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        processor_with(LLAVA, settings, of_request=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "must map names"),
        ({1: 2}, "must map names"),
        ({"fps": math.nan}, "all numbers finite"),
        ({"size": {"height": math.inf}}, "all numbers finite"),
        ({"a": object()}, "values of JSON"),
        ({"a": "b" * 5000}, "characters as JSON, the limit is 4096"),
        ({"images_kwargs": 1}, "images_kwargs=1, which must be a mapping"),
        ({"fps": 1, "videos_kwargs": {"fps": 2}}, "has 'fps' twice"),
    ],
)
def test_settings_that_are_no_small_mapping_of_finite_values_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        read_settings(given)


def test_nested_settings_are_read_and_those_of_frames_are_not_those_of_pictures():
    read = read_settings({"images_kwargs": {"do_pad": False}, "videos_kwargs": {"fps": 2}, "num_frames": 4})
    assert split_settings(read) == ({"do_pad": False}, {"fps": 2, "num_frames": 4})
    assert read_settings(None) == {}


VALUES = st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=9), st.lists, max_leaves=9)


@given(st.dictionaries(st.text(max_size=9), VALUES, max_size=9))
def test_any_mapping_is_read_or_refused_by_the_name_of_the_argument(given):
    try:
        read = read_settings(given)
        processor_with(LLAVA, read, of_request=True)
    except ValueError as error:
        assert "mm_processor_kwargs" in str(error)


def test_whole_numbers_stay_integers_and_others_are_refused_where_an_integer_is():
    has = {"tokens": 70, "size": {"height": 24, "width": 24}, "rescale_factor": 1, "image_mean": (0, 0, 0)}
    fits = {"tokens": 35.0, "size": {"height": 12.0}, "rescale_factor": 0.5, "image_mean": [0.5] * 3}
    found = replaced(has, fits, of_request=True)
    assert repr(found["tokens"]) == "35" and repr(found["size"]) == "{'height': 12, 'width': 24}"
    assert (found["rescale_factor"], found["image_mean"]) == (0.5, [0.5] * 3)
    for wrong, said in (({"tokens": 7.5}, "tokens=7.5"), ({"size": {"height": 0.5}}, "size's height=0.5")):
        with pytest.raises(ValueError, match=f"{said}, which must be an integer"):
            replaced(has, wrong, of_request=True)


def test_parts_of_a_size_that_the_processor_does_not_have_are_refused():
    for has, asked in (
        ({"longest_edge": 9}, {"height": 5, "width": 5}),
        ({"height": 9, "width": 9}, {"longest_edge": 5}),
    ):
        for of_request in (False, True):
            with pytest.raises(ValueError, match=f"with '{min(asked)}': the image processor's has {', '.join(has)}"):
                replaced({"size": has}, {"size": asked}, of_request=of_request)


def test_numbers_of_pixels_are_no_sides():
    for size in ({"longest_edge": 9}, {"shortest_edge": 9}, {"height": 9, "width": 9}):
        for name in ("min_pixels", "max_pixels"):
            with pytest.raises(ValueError, match=f"has '{name}': the model's image processor has size"):
                replaced({"size": size}, {name: 8}, of_request=True)

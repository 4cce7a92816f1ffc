"""Frames, sizes and times are those that transformers' video processors choose, which need torchvision to run."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.images.frames import (
    Sampling,
    clock,
    ends_included,
    evenly,
    evenly_in_patches,
    minutes,
    of_each_second,
    size_of_longest,
    size_of_patches,
    size_within,
    sparser_when_long,
    times_of_patches,
    without_ends,
)

HOME = Path(transformers.__file__).parent


def taken_from(file: str, *names: str) -> SimpleNamespace:
    """Return functions of one of transformers' files, which cannot be imported without torchvision; methods too."""
    tree = ast.parse((HOME / file).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
    from transformers.video_utils import default_sample_indices_fn

    space: dict[str, Any] = {"math": math, "np": np, "torch": torch, "MAX_IMAGE_SIZE": 4096}
    space |= {"default_sample_indices_fn": default_sample_indices_fn, "logger": SimpleNamespace(warning_once=print)}
    exec(compile(ast.Module(found, []), file, "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


QWEN2 = taken_from("models/qwen2_vl/video_processing_qwen2_vl.py", "smart_resize", "sample_frames")
QWEN3 = taken_from("models/qwen3_vl/video_processing_qwen3_vl.py", "smart_resize", "sample_frames")
GLM = taken_from("models/glm4v/video_processing_glm4v.py", "smart_resize", "sample_frames")
GLM46 = taken_from("models/glm46v/video_processing_glm46v.py", "sample_frames")
SMOL = taken_from("models/smolvlm/video_processing_smolvlm.py", "get_resize_output_image_size", "sample_frames")
GEMMA = taken_from("models/gemma4/video_processing_gemma4.py", "get_aspect_ratio_preserving_size")
BASE = taken_from("video_processing_utils.py", "sample_frames")
TIMES = taken_from("models/qwen3_vl/processing_qwen3_vl.py", "_calculate_timestamps")
totals = st.integers(4, 3000)
rates = st.floats(0.5, 120)
wanted = st.one_of(
    st.builds(lambda n: Sampling(num_frames=n), st.integers(1, 200)),
    st.builds(lambda f: Sampling(fps=f), st.floats(0.1, 30)),
)


def of_transformers(functions: SimpleNamespace, total: int, rate: float, sampling: Sampling, **more: Any) -> list[int]:
    about = transformers.video_utils.VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
    me = SimpleNamespace(num_frames=sampling.num_frames, fps=sampling.fps, **more)
    return [int(i) for i in functions.sample_frames(me, about)]


@given(totals, rates, wanted)
def test_frames_at_equal_distances_are_those_of_transformers(total, rate, sampling):
    try:
        want = of_transformers(BASE, total, rate, sampling)
    except ValueError:  # more frames than there are
        want = list(range(total))
    assert evenly(total, rate, sampling).tolist() == want


@given(totals, rates, wanted)
def test_frames_of_qwen2_are_those_of_transformers(total, rate, sampling):
    found = evenly_in_patches(total, rate, sampling).tolist()
    try:
        want = of_transformers(QWEN2, total, rate, sampling, temporal_patch_size=2, min_frames=4, max_frames=768)
    except (ValueError, ZeroDivisionError, RuntimeError):  # more frames than there are, or none
        assert len(found) in (2, total // 2 * 2)
    else:
        assert np.abs(np.array(found) - want).max() <= 1, "torch rounds in float32"


@given(totals, rates, st.integers(1, 200) | st.none(), st.floats(0.1, 30))
def test_frames_of_qwen3_are_those_of_transformers(total, rate, number, fps):
    sampling = Sampling(num_frames=number) if number else Sampling(fps=fps)
    about = SimpleNamespace(total_num_frames=total, fps=rate)
    me = SimpleNamespace(fps=sampling.fps, min_frames=4, max_frames=768)
    want = QWEN3.sample_frames(me, about, num_frames=number)
    assert ends_included(total, rate, sampling).tolist() == want.tolist()


@given(totals, rates, st.integers(1, 100), st.floats(0.1, 4))
def test_frames_of_smolvlm_are_those_of_transformers(total, rate, number, fps):
    about = transformers.video_utils.VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
    want = SMOL.sample_frames(SimpleNamespace(num_frames=number, fps=fps), about)
    assert without_ends(total, rate, Sampling(max_frames=number, fps=fps)).tolist() == want.tolist()


@given(st.integers(1, 3000), st.floats(0.5, 120), st.floats(0.1, 30), st.booleans(), st.sampled_from([20, 300]))
@settings(deadline=None)
def test_frames_of_glm_are_those_of_transformers(total, rate, fps, known, longest):
    seconds = total / rate if known else None
    about = SimpleNamespace(total_num_frames=total, fps=rate, duration=seconds)
    want = GLM.sample_frames(SimpleNamespace(fps=fps, max_duration=longest), about)
    sampling = Sampling(fps=fps, seconds=seconds)
    assert of_each_second(total, rate, sampling, longest=longest).tolist() == want.tolist()
    want = GLM46.sample_frames(SimpleNamespace(temporal_patch_size=2), about)
    found = sparser_when_long(total, rate, sampling).tolist()
    assert found == want.tolist() if len(want) else set(found) == {0}, "transformers shows nothing of a short file"


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(2, 64))
@settings(deadline=None)
def test_sizes_of_glm_are_those_of_transformers(height, width, frames):
    try:
        want = GLM.smart_resize(frames, height, width, 2, 28, 12544, 4704000)
    except ValueError:
        with pytest.raises(ValueError, match="200 times"):
            size_within((height, width), frames, factor=28, least=12544, most=4704000)
    else:
        assert size_within((height, width), frames, factor=28, least=12544, most=4704000) == want


sides = st.integers(8, 3000)


@given(sides, sides, st.integers(1, 64))
def test_sizes_of_qwen_are_those_of_transformers(height, width, frames):
    for ours, theirs in (
        (
            lambda: size_within((height, width), 1, factor=28, least=3136, most=1003520, counts_time=False),
            lambda: QWEN2.smart_resize(height, width, 28, 3136, 1003520),
        ),
        (
            lambda: size_within((height, width), 2 * frames, factor=32, least=4096, most=25165824),
            lambda: QWEN3.smart_resize(2 * frames, height, width, 2, 32, 4096, 25165824),
        ),
    ):
        try:
            want = theirs()
        except ValueError:
            with pytest.raises(ValueError, match="200 times"):
                ours()
        else:
            assert ours() == want


@given(sides, sides)
def test_sizes_of_gemma4_and_smolvlm_are_those_of_transformers(height, width):
    try:
        want = GEMMA.get_aspect_ratio_preserving_size(height, width, 16, 630, 3)
    except ValueError:
        with pytest.raises(ValueError, match="pixels"):
            size_of_patches((height, width), patch=16, most=630, pool=3)
    else:
        assert size_of_patches((height, width), patch=16, most=630, pool=3) == want
    video = SimpleNamespace(size=lambda: (1, 3, height, width))
    assert size_of_longest((height, width), 364) == SMOL.get_resize_output_image_size(video, 364)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=40).map(sorted), rates)
def test_times_are_those_of_transformers(indices, rate):
    assert times_of_patches(indices, rate) == pytest.approx(TIMES._calculate_timestamps(None, list(indices), rate, 2))
    assert minutes(indices, rate) == [f"{int(i / rate // 60):02d}:{int(i / rate % 60):02d}" for i in indices]


def test_a_number_takes_the_place_of_a_rate_and_times_are_as_many_as_groups():
    """vLLM 35909: a number of frames in a request beside the checkpoint's rate gave times of other frames."""
    sampling = Sampling(fps=2, do_sample_frames=True).given({"num_frames": 32}, "a request")
    assert sampling == Sampling(num_frames=32, do_sample_frames=True)
    found = ends_included(600, 30.0, sampling)
    assert len(found) == 32 and len(times_of_patches(found.tolist(), 30.0)) == 16
    assert Sampling(num_frames=8).given({"fps": 1.5}, "a request").num_frames is None


def test_lengths_are_told_in_hours():
    assert (clock(3723.9), clock(0.2)) == ("1:02:03", "0:00:00")


def test_a_rate_above_all_bounds_takes_each_frame_once_and_a_short_file_has_a_frame():
    for rate, fps in ((10.0, 1e9), (1e9, 1e9), (1e-300, 1e300), (10.0, 10.0)):
        found = of_each_second(100, rate, Sampling(fps=fps, seconds=10.0), longest=300)
        assert len(found) <= 100 and found.max() <= 99
    assert of_each_second(100, 10.0, Sampling(fps=1e9, seconds=10.0), longest=300).tolist() == list(range(100))
    slow = of_each_second(9000, 15.0, Sampling(fps=0.001, seconds=600.0), longest=300)
    assert slow.tolist() == [0, 0], "a rate below one frame of the longest video shows the first, as a pair"
    for total in (1, 2, 4):
        assert sparser_when_long(total, 25.0, Sampling(seconds=total / 25)).max() < total


def test_a_step_that_is_no_binary_fraction_takes_no_frame_after_the_last():
    """A step of 133 / 26 reaches 133 by the sum of rounded steps."""
    for total in range(2, 400):
        for number in range(2, total + 1, 2):
            assert evenly_in_patches(total, 10.0, Sampling(num_frames=number)).max() < total

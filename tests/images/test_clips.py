"""Videos are read frame by frame within bounds that are known before they are decoded, or refused by name."""

from __future__ import annotations

import base64
import io
import math
import re
import sys
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jpaged.image_sources import ImageSources
from jpaged.images.clips import is_frames, read_clips
from jpaged.images.frames import Sampling, evenly, evenly_in_patches

SOURCES = ImageSources(max_frames=40, max_seconds=20, max_total_pixels=40 * 64 * 48, max_pixels=64 * 48)
ALL = Sampling()
CHOOSER = SimpleNamespace(sampler=evenly, of_files=lambda sampling: sampling)


def film(
    number: int = 12, fps: float = 6, *, size=(48, 64), form: str = "mp4", codec: str = "mpeg4", shift: int = 0
) -> bytes:
    """Return a file whose frames grow brighter by an equal step."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = size
        stream.pix_fmt = {"gif": "rgb8", "ffv1": "bgr0"}.get(codec, "yuv420p")
        for i in range(number):
            pixels = np.full((*size, 3), 10 + i * 200 // max(number, 1), np.uint8)
            for packet in stream.encode(
                av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=stream.pix_fmt)
            ):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


def url(data: bytes, media: str = "video/mp4") -> str:
    return f"data:{media};base64," + base64.b64encode(data).decode()


def read(video, sampling=ALL, sources=SOURCES, **settings):
    return read_clips([video], sources, CHOOSER, sampling.given(settings, "settings"))[0]


def refusal(video, sampling=ALL, sources=SOURCES, **settings) -> str:
    with pytest.raises(ValueError) as error:
        read(video, sampling, sources, **settings)
    assert "video 1 of 1" in str(error.value) or "settings" in str(error.value), error.value
    return str(error.value)


FRAMES = np.random.default_rng(0).integers(0, 256, (7, 5, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize("form", ["mp4", "matroska", "avi", "gif", "webm"])
def test_a_file_gives_the_frames_of_its_numbers_in_any_container(form, tmp_path):
    codec = {"gif": "gif", "webm": "libvpx"}.get(form, "mpeg4")
    data = film(form=form, codec=codec)
    path = tmp_path / "film"
    path.write_bytes(data)
    sources = replace(SOURCES, folders=(tmp_path,))
    clips = [
        read(url(data), num_frames=4),
        read(path, sources=sources, num_frames=4),
        read(f"file://{path}", sources=sources, fps=2.1),
    ]
    for clip in clips:
        assert (clip.indices, clip.total, clip.size) == ((0, 3, 6, 9), 12, (48, 64))
        assert clip.fps == pytest.approx(6, rel=0.05)
        brightness = clip.frames.mean((1, 2, 3))
        np.testing.assert_allclose(brightness, [10 + i * 200 // 12 for i in clip.indices], atol=20)
        assert clip.digest(0, 4) == clips[0].digest(0, 4) != clip.digest(0, 3)


def test_frames_in_memory_are_taken_in_every_form():
    listed = [Image.fromarray(frame) for frame in FRAMES]
    forms = [FRAMES, listed, list(FRAMES), (FRAMES, {"fps": 2.0}), (listed, None)]
    clips = [read(form) for form in forms]
    for form, clip in zip(forms, clips, strict=True):
        assert is_frames(form) and (clip.frames == FRAMES).all() and clip.indices == tuple(range(7))
    assert clips[3].fps == 2.0 and clips[0].fps is None
    sampled = read((FRAMES, {"fps": 2.0}), fps=1)
    assert sampled.indices == (0, 2, 4) and (sampled.frames == FRAMES[[0, 2, 4]]).all()
    known = read((FRAMES, {"fps": 30, "frames_indices": list(range(0, 70, 10)), "total_num_frames": 80}), num_frames=3)
    assert known.indices == tuple(range(0, 70, 10)) and known.total == 80, "the caller has sampled"
    assert not is_frames("a.mp4") and not is_frames(["a.mp4"]) and not is_frames([FRAMES, FRAMES])


def test_frames_in_jpeg_are_bounded_before_the_first_is_decoded():
    """vLLM 51969: a request's number of frames, or a list of JPEGs, took more frames than the server allows."""
    file = io.BytesIO()
    Image.fromarray(FRAMES[0]).save(file, "JPEG")
    jpeg = base64.b64encode(file.getvalue()).decode()
    clip = read("data:video/jpeg;base64," + ",".join([jpeg] * 3))
    assert clip.frames.shape == (3, 5, 4, 3) and clip.total == 3
    said = refusal("data:video/jpeg;base64," + ",".join(["AAAA"] * 41))
    assert "41 frames, the limit is max_frames=40" in said
    assert "frame 2 of 2" in refusal(f"data:video/jpeg;base64,{jpeg},AAAA")
    for number in (-1, 0, 10**9):
        sampling = {"num_frames": number}
        if number > 0:
            assert len(read(FRAMES, **sampling).frames) == 7
        else:
            assert "must be an integer above 0" in refusal(FRAMES, **sampling)
    assert "41 frames would be taken" in refusal(np.zeros((50, 4, 4, 3), np.uint8), num_frames=41)


@pytest.mark.parametrize(
    ("video", "message"),
    [
        ([], "of the type list"),
        (FRAMES[:0], "has 0 frames"),
        (FRAMES.astype(np.float32), "has the dtype float32; pixels are uint8"),
        (np.full((2, 5, 4, 3), np.nan), "has the dtype float64"),
        (FRAMES[..., :2], r"has the shape \[5, 4, 2\]"),
        (FRAMES[:, :0], r"has the shape \[0, 4, 3\]"),
        ([FRAMES[0], FRAMES[1][:2]], "and the first one another size"),
        ([FRAMES[0], Image.new("RGB", (9, 9))], "and the first one another size"),
        ((FRAMES, {"fps": -1}), r"has fps=-1, which must be a number from 1e-06 to 1e\+06"),
        ((FRAMES, {"fps": 1e-300}), "has fps=1e-300"),
        ((FRAMES, {"fps": float("nan")}), "has fps=nan"),
        ((FRAMES, {"fps": True}), "has fps=True"),
        ((FRAMES, {"rate": 1}), "has 'rate' in its metadata"),
        ((FRAMES, {"frames_indices": [1, 2]}), "one number from 0 to 999999999999 for each frame"),
        ((FRAMES, {"frames_indices": [-1] * 7}), "for each frame"),
        ((FRAMES, {"frames_indices": [10**12] * 7}), "for each frame"),
        ((FRAMES, {"frames_indices": [*range(7)], "total_num_frames": 6}), "=6, which must be at least 7 by"),
        ((FRAMES, {"total_num_frames": 10**13}), "total_num_frames=10000000000000"),
        ((FRAMES, {"total_num_frames": -5}), r"video 1 of 1: total_num_frames=-5 must be in \[1, 10+\]"),
        ((FRAMES, {"total_num_frames": [1]}), r"video 1 of 1: total_num_frames=\[1\] must be an integer"),
        (np.zeros((41, 4, 4, 3), np.uint8), "41 frames would be taken, the limit is max_frames=40"),
        (np.zeros((3, 60, 90, 3), np.uint8), "90 x 60 pixels a frame, the limit is max_pixels=3072"),
        (5, "of the type int"),
        (b"abc", "of the type bytes"),
        ({"a": 1}, "of the type dict"),
    ],
)
def test_what_is_no_video_within_the_bounds_is_refused_by_name(video, message):
    assert re.search(message, refusal(video))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fps": -2}, "fps=-2, which must be a number from 1e-06 to 1e+06"),
        ({"fps": float("inf")}, "fps=inf"),
        ({"fps": 1e308}, "fps=1e+308"),
        ({"num_frames": 0}, "num_frames=0, which must be an integer above 0"),
        ({"num_frames": 2.5}, "num_frames=2.5"),
        ({"do_sample_frames": "yes"}, "must be true or false"),
        ({"fps": 1, "num_frames": 2}, "give one of them"),
    ],
)
def test_samplings_that_make_no_sense_are_refused(settings, message):
    assert message in refusal(FRAMES, **settings)


def test_broken_hostile_and_long_files_are_refused_before_they_are_decoded(tmp_path):
    data = film()
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(data)
    playlist = f"#EXTM3U\n#EXTINF:1,\nfile://{secret}\n#EXT-X-ENDLIST\n".encode()
    listing = f"ffconcat version 1.0\nfile {secret}\n".encode()
    for broken in (b"", b"x" * 999, data[: len(data) // 3], playlist, listing, b"GIF89a" + bytes(50)):
        said = refusal(url(broken))
        assert "no video that is read, or is corrupt" in said or "0 frames" in said or "corrupt or truncated" in said, (
            said
        )
        assert "secret" not in said
    long = film(600, fps=20, size=(16, 16))
    assert "30.0 seconds or more, the limit is max_seconds=20" in refusal(url(long), num_frames=1)
    slow = film(8, fps=Fraction(1, 4), size=(16, 16))
    assert "the limit is max_seconds=20" in refusal(url(slow), num_frames=1)
    assert "64 x 64 pixels a frame" in refusal(url(film(size=(64, 64))), num_frames=1)
    assert "max_total_pixels leaves" in refusal(url(data), sources=replace(SOURCES, max_total_pixels=64 * 48 * 11))
    assert "max_video_bytes=99" in refusal(url(data), sources=replace(SOURCES, max_video_bytes=99))
    assert "media type 'image/png', not video/" in refusal(url(data, "image/png"))
    assert "folders" in refusal(str(secret)) and "hosts" in refusal("http://127.0.0.1:9/a.mp4")
    sound = io.BytesIO()
    with av.open(sound, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    assert "has no video stream" in refusal(url(sound.getvalue()))


def test_a_rate_that_makes_more_frames_than_are_taken_is_refused_with_a_way_out():
    many = np.zeros((100, 4, 4, 3), np.uint8), {"fps": 10.0}
    said = refusal(many, fps=5)
    assert "50 frames would be taken, the limit is max_frames=40" in said and "'num_frames': ...} takes fewer" in said
    assert len(read(many, fps=5, max_frames=30).frames) == 30
    assert evenly_in_patches(100, 10.0, Sampling(num_frames=7, max_frames=7)).size == 6, "7 are rounded to 8 of pairs"
    assert evenly_in_patches(100, None, Sampling(max_frames=7)).size == 6


def test_all_videos_of_a_prompt_share_one_bound_and_their_number_is_one():
    two = [FRAMES, FRAMES]
    assert len(read_clips(two, replace(SOURCES, max_total_pixels=14 * 20), CHOOSER, ALL)) == 2
    with pytest.raises(ValueError, match=r"video 2 of 2: 7 frames .* max_total_pixels leaves 139"):
        read_clips(two, replace(SOURCES, max_total_pixels=14 * 20 - 1), CHOOSER, ALL)
    with pytest.raises(ValueError, match="2 videos were given, the limit is max_videos=1"):
        read_clips(two, replace(SOURCES, max_videos=1), CHOOSER, ALL)


def test_without_pyav_files_are_refused_and_frames_are_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    assert len(read(FRAMES).frames) == 7
    with pytest.raises(ImportError, match=r'videos of files need PyAV.*pip install "\.\[video\]"'):
        read(url(b"abc"))


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_any_bytes_are_read_or_refused(noise, place):
    data = bytearray(DATA)
    data[place : place + len(noise)] = noise
    try:
        clip = read(url(bytes(data)), num_frames=2)
    except ValueError as error:
        assert "video 1 of 1" in str(error)
    else:
        # Noise in the header of the codec may say another size, which is compared with the bounds.
        assert math.prod(clip.size) <= SOURCES.max_pixels and len(clip.frames) <= 2


DATA = film(4, size=(16, 16))

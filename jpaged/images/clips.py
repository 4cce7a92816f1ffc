"""Reads a caller's video: frames in memory, a ``data:`` URL, a local file or an http(s) URL.

What it costs to decode is known before: seconds, frames and pixels are bounded by the container's header and by its
packets, which are counted without decoding them. Only the frames that a model is shown become pixels.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt8

from jpaged.image_sources import ImageSources, keep_pixels, known_pixels
from jpaged.images.frames import OF_RATES, RATES, Indices, Sampling, is_rate
from jpaged.images.pixels import decoded, is_pil, picture_of
from jpaged.images.sources import bytes_of, shown_url
from jpaged.validation import integer

_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,flv,ogg"
"""FFmpeg's names of the containers that are read. Others, as playlists, may name further files."""
_JPEGS = "data:video/jpeg;base64,"
_MOST_RATE = 120
"""Frames in a second of video: a file with more is not one to look at."""
_MOST_SECONDS = 1e9
_MOST_NUMBER = 10**12
"""The number of a frame among all of its video is less."""
_METADATA = (
    "fps",
    "total_num_frames",
    "frames_indices",
    "duration",
    "video_backend",
    "do_sample_frames",
    "width",
    "height",
)


@dataclass(frozen=True, eq=False)
class Clip:
    """The frames of a video that a model is shown.

    Attributes:
        frames: upright, RGB.
        indices: the number of each among all frames of the video.
        fps: all frames in a second; None = not known.
        total: number of all frames.
        duration: seconds of the whole video; None = not known.
    """

    frames: UInt8[np.ndarray, "frames height width 3"]
    indices: tuple[int, ...]
    fps: float | None
    total: int
    duration: float | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Return (height, width)."""
        return self.frames.shape[1], self.frames.shape[2]

    def digest(self, first: int, last: int) -> bytes:
        """Return 32 bytes that are equal for equal pixels of the frames [`first`, `last`), in any process."""
        state = hashlib.blake2b(digest_size=32, person=b"jpaged-frames")
        frames = np.ascontiguousarray(self.frames[first:last])
        state.update(repr(frames.shape).encode())
        state.update(frames.data)
        return state.digest()


class ChoosesFrames(Protocol):
    """Chooses the frames that a model is shown; see `jpaged.images.frames`."""

    def sampler(self, total: int, fps: float | None, sampling: Sampling, /) -> Indices:
        """Return the numbers of the frames, in order."""

    def of_files(self, sampling: Sampling) -> Sampling:
        """Return how a file is sampled, whose frames its caller has not chosen."""


def is_frames(video: Any) -> bool:
    """Tell whether a value is one video of frames in memory, with or without what is known of it."""
    if isinstance(video, tuple) and len(video) == 2 and isinstance(video[1], Mapping | None):
        return True
    if isinstance(video, Sequence) and not isinstance(video, str | bytes):
        return bool(video) and all(is_pil(frame) or getattr(frame, "ndim", 0) == 3 for frame in video)
    return hasattr(video, "ndim")


def read_clips(videos: Sequence[Any], sources: ImageSources, chooser: ChoosesFrames, sampling: Sampling) -> list[Clip]:
    """Return the frames to be shown of several videos; nothing is read if they are too many.

    Args:
        videos: each is an array [frames, height, width, 3] of bytes, a list of PIL images or of such arrays, a pair of
            one and a mapping of what is known of it (``fps``, ``frames_indices``, ``total_num_frames``), a ``data:``,
            ``http(s):`` or ``file:`` URL, or else a path.
        sources: where they may come from and how large they may be.
        chooser, sampling: choose the frames.

    Raises:
        ValueError: there are too many, one is too long or too large, not allowed, corrupt, truncated, or none that is
            read; the message names the video and the limit.
        ImportError: a file needs PyAV, or PIL images need Pillow, and it is not installed.
    """
    if len(videos) > sources.max_videos:
        raise ValueError(f"{len(videos)} videos were given, the limit is max_videos={sources.max_videos}")
    clips: list[Clip] = []
    pixels = 0
    for number, video in enumerate(videos, start=1):
        place = f"video {number} of {len(videos)}"
        left = replace(sources, max_total_pixels=max(1, sources.max_total_pixels - pixels))
        if isinstance(video, str):
            clip: Clip | None = known_pixels(video, sampling)
            if clip is None or math.prod(clip.frames.shape[:3]) > left.max_total_pixels:
                clip = _of_file(video, place, left, chooser, sampling)
                keep_pixels(video, clip, clip.frames.nbytes, sampling)
            clips.append(clip)
        elif isinstance(video, os.PathLike):
            clips.append(_of_file(os.fspath(video), place, left, chooser, sampling))
        else:
            clips.append(_of_frames(video, place, left, chooser, sampling))
        pixels += math.prod(clips[-1].frames.shape[:3])
    return clips


# ---------------------------------------------------------------- frames in memory


def _of_frames(video: Any, place: str, sources: ImageSources, chooser: ChoosesFrames, sampling: Sampling) -> Clip:
    known: Mapping[str, Any] = {}
    if isinstance(video, tuple) and len(video) == 2 and isinstance(video[1], Mapping | None):
        video, known = video[0], video[1] or {}
    if hasattr(video, "detach"):  # a tensor of torch
        video = video.detach().cpu().numpy()
    if not is_frames(video):
        raise ValueError(f"{place} is {_kind(video)}: it must be frames, as an array or a list, a URL or a path")
    total = len(video)
    if not total:
        raise ValueError(f"{place} has 0 frames; at least 1 is needed")
    fps, indices, whole = _checked(known, total, place)
    if sampling.do_sample_frames and known.get("do_sample_frames") is not False and "frames_indices" not in known:
        sampling = replace(sampling, seconds=known.get("duration"))  # 0 = it is not known
        chosen = _chosen(total, fps, place, chooser, sampling, sources)
    elif sampling.most_given is not None and total > sampling.most_given:
        raise ValueError(
            f"{place}: {total} frames would be taken, the limit is max_frames={sampling.most_given} of "
            "mm_processor_kwargs; 'num_frames' there takes fewer of frames that are not sampled yet"
        )
    else:
        chosen = np.arange(total)
    _check_number(len(chosen), place, sources)
    frames = _pixels_of(video, chosen, place, sources)
    return Clip(frames, tuple(indices[i] for i in chosen), fps, whole, known.get("duration"))


def _checked(known: Mapping[str, Any], total: int, place: str) -> tuple[float | None, Sequence[int], int]:
    """Return the rate, the numbers of the frames and the number of all, from what a caller says of given frames."""
    if unknown := sorted(map(str, known.keys() - set(_METADATA))):
        raise ValueError(f"{place} has {unknown[0]!r} in its metadata; known are {', '.join(_METADATA)}")
    fps = known.get("fps")
    if fps is not None and not is_rate(fps):
        raise ValueError(f"{place} has fps={fps!r}, which must be {OF_RATES}")
    seconds = known.get("duration")
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < _MOST_SECONDS
    ):
        raise ValueError(
            f"{place} has duration={seconds!r}, which must be a number of seconds from 0 to {_MOST_SECONDS:g}"
        )
    number = known.get("total_num_frames")
    if number is not None:
        number = integer(f"{place}: total_num_frames", number, low=1, high=_MOST_NUMBER)
    indices = known.get("frames_indices")
    if indices is None:
        return None if fps is None else float(fps), range(total), total
    found = np.asarray(indices)
    if found.shape != (total,) or found.dtype.kind not in "iu" or (found < 0).any() or (found >= _MOST_NUMBER).any():
        raise ValueError(
            f"{place} has frames_indices={indices!r}, which must be one number from 0 to {_MOST_NUMBER - 1} for each "
            "frame"
        )
    least = int(found.max()) + 1
    if number is not None and number < least:
        raise ValueError(f"{place} has total_num_frames={number}, which must be at least {least} by its frames_indices")
    return None if fps is None else float(fps), found.tolist(), number or least


def _pixels_of(video: Any, chosen: Indices, place: str, sources: ImageSources) -> UInt8[np.ndarray, "frames h w 3"]:
    made: list[np.ndarray] = []
    for i in chosen.tolist():
        frame = video[i]
        name = f"{place}, frame {i + 1} of {len(video)}"
        if is_pil(frame):
            frame = picture_of(frame, name, sources.max_pixels).pixels
        elif hasattr(frame, "detach"):
            frame = frame.detach().cpu().numpy()
        if not isinstance(frame, np.ndarray):
            raise ValueError(f"{name} is {_kind(frame)}; it must be a PIL image or an array")
        if frame.dtype != np.uint8:
            raise ValueError(f"{name} has the dtype {frame.dtype}; pixels are uint8, from 0 to 255")
        if frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
            raise ValueError(f"{name} has the shape {list(frame.shape)}, which must be [height, width, 3] with pixels")
        if made and made[0].shape != frame.shape:
            raise ValueError(f"{name} has {frame.shape[1]} x {frame.shape[0]} pixels, and the first one another size")
        if not made:
            _check_pixels(len(chosen), frame.shape[0], frame.shape[1], place, sources)
        made.append(frame)
    return np.stack(made)


# ---------------------------------------------------------------- files


def _of_file(text: str | bytes, place: str, sources: ImageSources, chooser: ChoosesFrames, sampling: Sampling) -> Clip:
    text = os.fsdecode(text)
    name = f"{place}, {shown_url(text)}"
    if text[: len(_JPEGS)].lower() == _JPEGS:
        return _of_jpegs(text[len(_JPEGS) :], name, sources, chooser, sampling)
    try:
        data = bytes_of(text, name, replace(sources, max_bytes=sources.max_video_bytes), "video")
    except ValueError as error:
        raise ValueError(str(error).replace("max_bytes=", "max_video_bytes=")) from error
    av = _pyav()
    try:
        return _decoded(av, data, name, sources, chooser, sampling)
    except av.error.FFmpegError as error:
        raise ValueError(f"{name} is no video that is read, or is corrupt: {error.strerror}") from error
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # decoders of broken files raise many kinds
        raise ValueError(f"{name} is corrupt or truncated: {error or type(error).__name__}") from error


def _of_jpegs(bodies: str, name: str, sources: ImageSources, chooser: ChoosesFrames, sampling: Sampling) -> Clip:
    """Return the clip of JPEG frames in base64, with commas between them (vLLM's)."""
    if (number := bodies.count(",") + 1) > sources.max_frames:
        raise ValueError(f"{name} has {number} frames, the limit is max_frames={sources.max_frames}")
    if len(bodies) * 3 // 4 > sources.max_video_bytes:
        raise ValueError(
            f"{name} has about {len(bodies) * 3 // 4} bytes, the limit is max_video_bytes={sources.max_video_bytes}"
        )
    frames, pixels = [], 0
    for i, body in enumerate(bodies.split(","), start=1):
        where = f"{name}, frame {i} of {number}"
        data = bytes_of(f"data:image/jpeg;base64,{body}", where, replace(sources, max_bytes=sources.max_video_bytes))
        picture = decoded(data, where, sources.max_pixels, pixels, sources.max_total_pixels)
        frames.append(picture.pixels)
        pixels += math.prod(picture.size)
    return _of_frames(frames, name, sources, chooser, sampling)


def _decoded(
    av: Any, data: bytes, name: str, sources: ImageSources, chooser: ChoosesFrames, sampling: Sampling
) -> Clip:
    with _opened(av, data) as container:
        if not container.streams.video:
            raise ValueError(f"{name} has no video stream")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise ValueError(f"{name} has a codec that is not read")
        total, seconds = _length(container, stream, name, sources)
        rate = stream.average_rate or stream.guessed_rate
        fps = float(rate) if rate else (total / seconds if seconds else None)
        if fps is not None and not RATES[0] <= fps <= _MOST_RATE:
            raise ValueError(f"{name} has {fps:g} frames in a second, the limits are {RATES[0]:g} and {_MOST_RATE}")
    sampling = replace(chooser.of_files(sampling), seconds=total / fps if fps else None)
    chosen = _chosen(total, fps, name, chooser, sampling, sources)
    _check_number(len(chosen), name, sources)
    with _opened(av, data) as container:
        stream = container.streams.video[0]
        size = stream.codec_context.height, stream.codec_context.width
        _check_pixels(len(chosen), *size, name, sources)
        stream.codec_context.thread_count = 1
        frames = list(_taken(container.decode(stream), chosen, size, name))
    if len(frames) < len(chosen):
        raise ValueError(
            f"{name} is corrupt or truncated: {total} frames are announced, and frame "
            f"{int(chosen[len(frames)]) + 1} cannot be decoded"
        )
    return Clip(np.stack(frames), tuple(chosen.tolist()), fps, total, total / fps if fps else None)


def _opened(av: Any, data: bytes) -> Any:
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
    return av.open(io.BytesIO(data), options=options, metadata_errors="ignore")


def _length(container: Any, stream: Any, name: str, sources: ImageSources) -> tuple[int, float]:
    """Return the number of frames and the seconds of a video, by its header and its packets."""
    most = int(sources.max_seconds * _MOST_RATE)
    times = [float(stream.duration * stream.time_base)] if stream.duration else []
    times += [container.duration / 1e6] if container.duration else []
    total, dropped, last = 0, 0, 0.0
    for packet in container.demux(stream):
        if not packet.size:
            continue
        total += 1
        dropped += packet.is_discard  # an edit list hides it: it is decoded for those after it only
        if packet.pts is not None:
            last = max(last, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if total > most or last > sources.max_seconds:
            break
    seconds = max([*times, last])
    if seconds > sources.max_seconds or total > most:
        raise ValueError(f"{name} has {seconds:.1f} seconds or more, the limit is max_seconds={sources.max_seconds:g}")
    total -= dropped
    if not total:
        raise ValueError(f"{name} has 0 frames; at least 1 is needed")
    return (min(total, stream.frames) if stream.frames else total), seconds


def _taken(decoded: Iterator[Any], chosen: Indices, size: tuple[int, int], name: str) -> Iterator[np.ndarray]:
    """Yield the chosen frames, which are in order and may repeat; those between are decoded and dropped."""
    wanted = iter(chosen.tolist())
    coming = next(wanted, None)
    for number, frame in enumerate(decoded):
        if coming is None:
            return
        if (frame.height, frame.width) != size:
            raise ValueError(f"{name} changes its size from {size[1]} x {size[0]} to {frame.width} x {frame.height}")
        if number < coming:
            continue
        pixels = frame.to_ndarray(format="rgb24")
        upright = np.ascontiguousarray(np.rot90(pixels, round((frame.rotation or 0) / 90)))
        while coming == number:
            yield upright
            coming = next(wanted, None)


def _chosen(
    total: int, fps: float | None, name: str, chooser: ChoosesFrames, sampling: Sampling, sources: ImageSources
) -> Indices:
    if sampling.num_frames is not None:  # more are refused, and no sampler has to make their numbers first
        bounds = [max(total, sources.max_frames + 1), *([] if sampling.max_frames is None else [sampling.max_frames])]
        sampling = replace(sampling, num_frames=min(sampling.num_frames, *bounds))
    try:
        return chooser.sampler(total, fps, sampling)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error


def _check_number(number: int, name: str, sources: ImageSources) -> None:
    if number > sources.max_frames:
        raise ValueError(
            f"{name}: {number} frames would be taken, the limit is max_frames={sources.max_frames}; "
            "mm_processor_kwargs={'num_frames': ...} takes fewer"
        )


def _check_pixels(number: int, height: int, width: int, name: str, sources: ImageSources) -> None:
    if not height or not width:
        raise ValueError(f"{name} has no pixels: {width} x {height}")
    if height * width > sources.max_pixels:
        raise ValueError(f"{name} has {width} x {height} pixels a frame, the limit is max_pixels={sources.max_pixels}")
    if number * height * width > sources.max_total_pixels:
        raise ValueError(
            f"{name}: {number} frames of {width} x {height} pixels have {number * height * width}, and "
            f"max_total_pixels leaves {sources.max_total_pixels}"
        )


def _kind(value: Any) -> str:
    return f"of the type {type(value).__name__}"


def _pyav() -> Any:
    """Return the module ``av``, with FFmpeg's own log off: it writes to the process's stderr.

    Raises:
        ImportError: PyAV is not installed.
    """
    try:
        av = importlib.import_module("av")
        importlib.import_module("av.logging").set_level(None)
    except ImportError as error:
        raise ImportError(
            'videos of files need PyAV, which is not installed: pip install ".[video]" in a clone of jpaged; '
            "frames in memory need none"
        ) from error
    return av

"""Chooses the frames of a video that a model is shown, their sizes and their times, as transformers' processors do.

Its video processors need torchvision. These are their formulas on plain numbers, so that NumPy and Pillow are enough.
A video with fewer frames than a number asks for, which they refuse, is taken whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int

Indices = Int[np.ndarray, " frames"]
Size = tuple[int, int]
"""Height and width."""
UNKNOWN_FPS = 24.0
"""Frames in a second of a video that does not say it, as transformers has it."""
RATES = 1e-6, 1e6
"""The least and the most frames in a second that a video or a request may state: times stay numbers of a few digits."""
MOST_OBLONG = 200
"""A picture's longer side is at most so many times its shorter one, as in transformers."""
LARGEST_SIDE = 4096
_MOST_OF_QWEN = 768
"""Frames that a rate makes at most where the settings do not say it, as transformers' processors of Qwen have it."""


@dataclass(frozen=True)
class Sampling:
    """The settings of a checkpoint, an engine or a request that say which frames are taken.

    Attributes:
        do_sample_frames: whether a video of given frames is sampled too; one of a file always is.
        num_frames, fps: how many frames are taken, or how many of each second; one of them.
        min_frames, max_frames: bounds where `fps` says how many; the second one of `num_frames` too.
        seconds: length of the video where more is known of it than its frames; no setting.
        most_given: most frames in memory that are all taken, as an engine or a request bounds them; no setting.
    """

    do_sample_frames: bool = False
    num_frames: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    seconds: float | None = None
    most_given: int | None = None

    def given(self, settings: Mapping[str, Any], name: str) -> Sampling:
        """Return these settings with others in their place: a number of frames replaces a rate, and a rate a number.

        Args:
            name: how errors name them.

        Raises:
            ValueError: one is of another type or out of range, or both a number and a rate are given.
        """
        found = {key: settings[key] for key in SETTINGS if settings.get(key) is not None}
        for key, value in found.items():
            if key == "do_sample_frames":
                fits = isinstance(value, bool)
            elif key == "fps":
                fits = is_rate(value)
            else:
                fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if not fits:
                raise ValueError(f"{name} has {key}={value!r}, which must be {_KINDS.get(key, 'an integer above 0')}")
        if "fps" in found and "num_frames" in found:
            raise ValueError(f"{name} has fps={found['fps']} and num_frames={found['num_frames']}: give one of them")
        if found.keys() & {"fps", "num_frames"}:
            found = {"fps": None, "num_frames": None, "do_sample_frames": True, **found}
        return replace(self, **found)


SETTINGS = ("do_sample_frames", "num_frames", "fps", "min_frames", "max_frames")
"""Names that a checkpoint, an engine or a request may give."""
OF_RATES = f"a number from {RATES[0]:g} to {RATES[1]:g}"
"""Says in errors what a rate has to be."""
_KINDS = {"do_sample_frames": "true or false", "fps": OF_RATES}
Sampler = Callable[[int, float | None, Sampling], Indices]
"""Returns the frames to take of so many, at so many a second; None = their rate is not known."""


def evenly(total: int, fps: float | None, sampling: Sampling) -> Indices:
    """Return frames at equal distances, from the first on (LLaVA-OneVision, Gemma 4)."""
    number = _number(total, fps, sampling)
    number = total if number is None else min(number, total)
    return np.arange(number) * total // number


def _number(total: int, fps: float | None, sampling: Sampling) -> int | None:
    """Return how many frames are taken; None = all."""
    if sampling.num_frames is not None or sampling.fps is None:
        return sampling.num_frames or sampling.max_frames
    return int(_bounded(int(total / _known(fps, sampling) * sampling.fps), total, sampling))


def _bounded(number: float, total: int, sampling: Sampling, *, least: int = 1, most: int | None = None) -> float:
    """Return how many frames of `total` are taken, of the number that a rate makes.

    Args:
        least, most: bounds where the settings have none; None = all frames.
    """
    return min(max(number, sampling.min_frames or least), sampling.max_frames or most or total, total)


def evenly_in_patches(total: int, fps: float | None, sampling: Sampling, *, patch: int = 2) -> Indices:
    """Return frames at equal distances, a multiple of `patch` of them (Qwen2-VL and Qwen2.5-VL)."""
    number: float | None = sampling.num_frames
    if number is not None:
        number = round(number / patch) * patch
        if sampling.max_frames is not None:
            number = min(number, sampling.max_frames // patch * patch)
    elif sampling.fps is not None:
        number = total / _known(fps, sampling) * sampling.fps
        number = _bounded(number, total, sampling, least=4, most=_MOST_OF_QWEN) // patch * patch
    elif sampling.max_frames is not None and sampling.max_frames < total:
        number = sampling.max_frames // patch * patch
    if number is None or total < patch:
        return np.arange(total)
    most = total // patch * patch
    if number > most:  # transformers refuses it
        return np.arange(most) * total // most
    # As torch counts them: a step that is no binary fraction may take one more.
    return np.minimum(np.arange(0, total, total / max(number, patch)).astype(int), total - 1)


def ends_included(total: int, fps: float | None, sampling: Sampling) -> Indices:
    """Return frames at equal distances, the last one included (Qwen3-VL and Qwen3.5)."""
    number = sampling.num_frames
    if number is None:
        made = total if sampling.fps is None else int(total / (fps or UNKNOWN_FPS) * sampling.fps)
        number = int(_bounded(made, total, sampling, least=4, most=_MOST_OF_QWEN))
    return np.linspace(0, total - 1, number).round().astype(int)


def of_each_second(total: int, fps: float | None, sampling: Sampling, *, longest: float) -> Indices:
    """Return frames at equal times, an even number of them; of a video longer than `longest` seconds as many as of one
    of that length (GLM-4.1V and GLM-4.5V)."""
    rate, last = _known(fps, sampling), total - 1
    wanted = min(sampling.fps or 2, rate * 1e6)  # finite, and as many as are there
    seconds = _seconds(total, rate, sampling)
    if seconds <= longest:
        number = int(min(max(seconds * wanted, 1), 1e15))
        if wanted > rate:  # each frame, up to the last time that is asked for
            found = list(range(min(last, math.ceil((number - 1) * rate / wanted)) + 1))
        else:
            found = [min(last, math.ceil(i * rate / wanted)) for i in range(min(number, total))]
    elif (number := max(int(longest * wanted), 1)) >= total:
        found = list(range(total))
    else:
        found = [min(last, math.ceil(time * rate)) for time in np.linspace(0, seconds, number)]
    return _in_pairs(found)


def sparser_when_long(
    total: int, fps: float | None, sampling: Sampling, *, patch: int = 2, most: int = 640, longest: float = 2400
) -> Indices:
    """Return frames at equal times, an even number of them: 3 patches of each second of a short video, 1 of one of up
    to five minutes, else one of two seconds (GLM-4.6V). A rate is not looked at."""
    rate, last = _known(fps, sampling), total - 1
    seconds = _seconds(total, rate, sampling)
    shown = min(seconds, longest)
    wanted = 3.0 if shown <= 30 else 1.0 if shown <= 300 else 0.5
    number = min(max(int(shown * wanted * patch), 1), most)
    if total < number:
        found = np.linspace(0, last, number, dtype=int).tolist()
    else:
        found, due, apart = [], 0.0, 1 / (patch * wanted)
        for frame in range(total):
            if frame * (1 / rate) >= due:
                due += apart
                found.append(frame)
                if due >= int(seconds):
                    break
    if len(found) < number:
        found = np.linspace(found[0], found[-1], number, dtype=int).tolist()
    elif len(found) > number:
        found = np.linspace(0, last, number, dtype=int).tolist()
    return _in_pairs(found)


def _seconds(total: int, rate: float, sampling: Sampling) -> float:
    """Return a video's length; as transformers has it where nothing but its rate is known."""
    return sampling.seconds or round((total - 1) / rate) + 1


def _in_pairs(frames: Sequence[int]) -> Indices:
    """Return the frames, each once; the last one twice where their number is odd."""
    once = list(dict.fromkeys(frames))
    return np.array(once + once[-1:] * (len(once) % 2), dtype=int)


def without_ends(total: int, fps: float | None, sampling: Sampling, *, skip: float = 1.0) -> Indices:
    """Return frames of the middle, each once; a second at each end of a long video is left out (SmolVLM)."""
    rate = _known(fps, sampling)
    wanted, most = sampling.fps or 1.0, sampling.max_frames or 64
    seconds = total / rate
    number = int(_bounded(round(wanted * seconds), total, sampling, most=most))
    first, last = 0, total - 1
    if seconds - 2 * skip > most * wanted:
        first, last = int(skip * rate), min(int(total - skip * rate), total - 1)
    if first >= last:
        first, last = 0, total - 1
    return np.unique(np.linspace(first, last, number, dtype=int))


def middles(total: int, fps: float | None, sampling: Sampling) -> Indices:
    """Return the frames in the middle of equal parts of a video (InternVL)."""
    number = _number(total, fps, sampling)
    if number is None or number >= total:
        return np.arange(total)
    step = total / number
    return np.arange(step / 2, total, step).astype(np.float32).astype(int)  # torch counts in this dtype


def _known(fps: float | None, sampling: Sampling) -> float:
    if fps is None:
        raise ValueError(f"fps={sampling.fps} samples by time, and the video does not say its own frames in a second")
    return fps


# ---------------------------------------------------------------- sizes


def check_oblong(size: Size, given: Size) -> None:
    """Check a picture's shape.

    Args:
        given: the size that its caller knows, which errors name.

    Raises:
        ValueError: a side is more than `MOST_OBLONG` times the other.
    """
    if max(size) > MOST_OBLONG * min(size):
        raise ValueError(
            f"{given[1]} x {given[0]} pixels: the longer side may be at most {MOST_OBLONG} times the shorter one"
        )


def size_within(
    size: Size,
    frames: int,
    *,
    factor: int,
    least: int,
    most: int,
    patch: int = 2,
    counts_time: bool = True,
    what: str = "frames",
) -> Size:
    """Return the multiples of `factor` nearest to a frame's sides whose pixels are within bounds (Qwen's smart_resize).

    Args:
        least, most: pixels; of all frames together where `counts_time`, which is Qwen3-VL's way, else of one.
        what: how errors name them.

    Raises:
        ValueError: a side is more than `MOST_OBLONG` times the other.
    """
    height, width = size
    frames = max(frames, patch)
    if counts_time and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > MOST_OBLONG:
        raise ValueError(f"{what} of {size[1]} x {size[0]} pixels: a side may be at most {MOST_OBLONG} times the other")
    rows, columns = (round(side / factor) * factor for side in (height, width))
    times, whole = (round(frames / patch) * patch, frames) if counts_time else (1, 1)
    if times * rows * columns > most:
        shrink = math.sqrt(whole * height * width / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif times * rows * columns < least:
        grow = math.sqrt(least / (whole * height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def size_of_patches(size: Size, *, patch: int, most: int, pool: int) -> Size:
    """Return the largest sides of a picture's shape that make at most `most` patches, pooled by squares (Gemma 4).

    Raises:
        ValueError: it is too narrow for one square.
    """
    height, width = size
    step = pool * patch
    scale = math.sqrt(most * patch**2 / (height * width))
    rows, columns = (math.floor(scale * side / step) * step for side in (height, width))
    longest = most // pool**2 * step
    if not rows and not columns:
        raise ValueError(f"{width} x {height} pixels become none: sides are multiples of {step}")
    if not rows:
        rows, columns = step, min(math.floor(width / height) * step, longest)
    elif not columns:
        rows, columns = min(math.floor(height / width) * step, longest), step
    if rows * columns > most * patch**2:
        raise ValueError(f"{width} x {height} pixels make more than {most} patches of {patch} x {patch}")
    return rows, columns


def size_of_longest(size: Size, longest: int, most: int = LARGEST_SIDE) -> Size:
    """Return sides of a frame's shape of which the longer is `longest`, at most `most`, the other even (SmolVLM)."""
    height, width = size
    longest = min(most, longest)
    if width >= height:
        rows = int(longest / (width / height))
        return max(rows + rows % 2, 1), longest
    columns = int(longest * (width / height))
    return longest, max(columns + columns % 2, 1)


# ---------------------------------------------------------------- times


def times_of_patches(indices: Sequence[int], fps: float | None, patch: int = 2) -> list[float]:
    """Return the seconds of each group of `patch` frames, the mean of its first and last (Qwen3-VL)."""
    whole = [*indices, *[indices[-1]] * (-len(indices) % patch)]
    seconds = [index / (fps or UNKNOWN_FPS) for index in whole]
    return [(seconds[i] + seconds[i + patch - 1]) / 2 for i in range(0, len(seconds), patch)]


def minutes(indices: Sequence[int], fps: float | None) -> list[str]:
    """Return the time of each frame as ``mm:ss`` (Gemma 4, SmolVLM)."""
    seconds = [index / (fps or UNKNOWN_FPS) for index in indices]
    return [f"{int(second // 60):02d}:{int(second % 60):02d}" for second in seconds]


def clock(seconds: float) -> str:
    """Return a length as ``h:mm:ss`` (SmolVLM)."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def is_rate(value: Any) -> bool:
    """Tell whether a value is a number of frames in a second; see `RATES`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and RATES[0] <= value <= RATES[1]

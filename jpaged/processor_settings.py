"""Checks the settings of an image or video processor that come in place of the checkpoint's (`mm_processor_kwargs`).

An engine's are its owner's and may be any that the processor has. A request's come from a stranger: they keep to the
types of the settings that they replace, and lower bounds only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NAME = "mm_processor_kwargs"
VIDEO_SETTINGS = frozenset(("do_sample_frames", "fps", "num_frames", "min_frames", "max_frames"))
"""Settings that say which frames of a video are taken. They change no image, so that its digest leaves them out."""
BOUNDS_OF_PIXELS: Mapping[str, str] = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Numbers of pixels by their older names, and the parts of a size that they stand for."""
_MOST = 4096
"""Characters of a request's settings as JSON."""
_BOUNDS = ("max_", "longest_edge", "height", "width", "shortest_edge", "image_seq_length", "num_frames")
"""Beginnings of the names of settings that bound the work of one item."""
_CALLS = frozenset(("return_tensors", "data_format", "input_data_format", "device", "disable_grouping"))
"""Names that a processor takes with a call, and that say nothing of an image."""
_FRACTIONS = ("rescale_factor", "max_pixels_tolerance")
"""Numbers that may have a fraction, though a checkpoint may have a whole one."""
_FILTERS = range(6)
_NESTED = ("images_kwargs", "videos_kwargs")


def read_settings(given: Any) -> dict[str, Any]:
    """Return the settings as plain data; those of ``images_kwargs`` and ``videos_kwargs`` with the others.

    Raises:
        ValueError: they are no mapping of names to JSON values, are too long, or have one name twice.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{NAME}={given!r} must map names of the processor's settings to values")
    try:
        text = json.dumps(dict(given), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{NAME} must have values of JSON, all numbers finite: {error}") from error
    if len(text) > _MOST:
        raise ValueError(f"{NAME} has {len(text)} characters as JSON, the limit is {_MOST}")
    plain = json.loads(text)
    for nested in _NESTED:
        inner = plain.pop(nested, {})
        if not isinstance(inner, Mapping):
            raise ValueError(f"{NAME} has {nested}={inner!r}, which must be a mapping")
        if twice := sorted(inner.keys() & plain.keys()):
            raise ValueError(f"{NAME} has {twice[0]!r} twice: by itself and in {nested}")
        plain |= inner
    return plain


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that change an image, and those that say which frames of a video are taken."""
    frames = {name: value for name, value in settings.items() if name in VIDEO_SETTINGS}
    return {name: value for name, value in settings.items() if name not in VIDEO_SETTINGS}, frames


def processor_with(processor: Any, settings: Mapping[str, Any], *, of_request: bool) -> Any:
    """Return an image processor of transformers with some settings replaced.

    Args:
        of_request: whether a request gives them, which may lower a bound and not raise it.

    Raises:
        ValueError: the processor has no such setting, or the value is of another type, or above a bound.
    """
    if not settings:
        return processor
    has = processor.to_dict()
    known = (has.keys() | set(processor.valid_kwargs.__annotations__)) - _CALLS - {"image_processor_type"}
    found = replaced({name: has.get(name) for name in known}, settings, of_request=of_request)
    try:
        return type(processor)(**{name: value for name, value in found.items() if name in has or value is not None})
    except Exception as error:  # transformers checks some values, each in its own way
        raise ValueError(f"{NAME}={dict(settings)!r} is refused by the model's image processor: {error}") from error


def replaced(has: Mapping[str, Any], settings: Mapping[str, Any], *, of_request: bool) -> dict[str, Any]:
    """Return a processor's settings with some in the place of its own; see `processor_with`.

    Args:
        has: all names that the processor knows, with its values.
    """
    settings = _sized(settings, has.get("size"))
    for name, value in list(settings.items()):
        if name not in has:
            raise ValueError(f"{NAME} has {name!r}: the model's image processor has {', '.join(sorted(has))}")
        _check_type(name, value, has[name])
        settings[name] = value = _whole(name, value, has[name])
        if of_request:
            check_bound(name, value, has[name])
    return {**has, **settings}


def counts_pixels(size: Any) -> bool:
    """Tell whether a processor's size bounds the pixels of a picture: alone, ``longest_edge`` is a side of it."""
    return isinstance(size, Mapping) and all(size.get(side) is not None for side in BOUNDS_OF_PIXELS.values())


def _sized(settings: Mapping[str, Any], size: Any) -> dict[str, Any]:
    """Return settings in which the processor's size takes the place of a part of it and of numbers of pixels."""
    given = dict(settings)
    if not isinstance(size, Mapping):
        return given
    sides, known = given.get("size", {}), [name for name, side in size.items() if side is not None]
    if isinstance(sides, Mapping) and (unknown := sorted(sides.keys() - set(known))):
        raise ValueError(f"{NAME} has size={sides!r} with {unknown[0]!r}: the image processor's has {', '.join(known)}")
    for name, side in BOUNDS_OF_PIXELS.items():
        if counts_pixels(size) and name in given and isinstance(sides, Mapping):
            sides = {**sides, side: given.pop(name)}
    return {**given, "size": {**size, **sides}} if isinstance(sides, Mapping) and sides else given


def _check_type(name: str, value: Any, now: Any) -> None:
    """Compare the type of a value with that of the one that it replaces."""
    kinds: tuple[tuple[str, type | tuple[type, ...]], ...] = (
        ("true or false", bool),
        ("a number", (int, float)),
        ("text", str),
        ("a list", (list, tuple)),
        ("a mapping", Mapping),
    )
    for said, kind in kinds:
        if not isinstance(now, kind):
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{NAME} has {name}={value!r}, which must be {said}, as the checkpoint's {now!r}")
        break
    if isinstance(now, list | tuple) and _is_number(now[:1]) and not all(_is_number([each]) for each in value):
        raise ValueError(f"{NAME} has {name}={value!r}, which must be a list of numbers, as {list(now)!r}")
    if name in ("image_std", "rescale_factor") and not all(value if isinstance(value, list) else [value]):
        raise ValueError(f"{NAME} has {name}={value!r}: pixels are divided by it, or all become equal")
    if name == "resample" and value is not None and value not in _FILTERS:
        raise ValueError(f"{NAME} has {name}={value!r}, which must be the number of a filter of Pillow's, 0 to 5")
    if isinstance(now, Mapping):
        for key, each in value.items():
            if not _is_number([each]) or not each > 0:
                raise ValueError(f"{NAME} has {name}={value!r}, whose {key} must be a positive number")


def _whole(name: str, value: Any, now: Any) -> Any:
    """Return a value in which whole numbers are integers where those in their place are; see `_check_type`.

    Raises:
        ValueError: such a number has a fraction.
    """
    if isinstance(now, Mapping) and isinstance(value, Mapping):
        return {key: _whole(f"{name}'s {key}", each, now.get(key)) for key, each in value.items()}
    if not isinstance(now, int) or isinstance(now, bool) or name in _FRACTIONS or not isinstance(value, float):
        return value
    if not value.is_integer():
        raise ValueError(f"{NAME} has {name}={value!r}, which must be an integer, as the checkpoint's {now!r}")
    return int(value)


def check_bound(name: str, value: Any, now: Any) -> None:
    """Check that a request raises no bound.

    Raises:
        ValueError: it does; the message has both numbers.
    """
    if isinstance(value, Mapping):
        sides = now if isinstance(now, Mapping) else {}
        for key, each in value.items():
            longest = sides.get("longest_edge") if key == "shortest_edge" else None
            check_bound(key, each, longest or sides.get(key))
        return
    if not name.startswith(_BOUNDS):
        return
    if now is None:
        raise ValueError(f"{NAME} has {name}={value!r}, a bound that the engine does not have and a request cannot set")
    if _is_number([value]) and _is_number([now]) and not 0 < value <= now:
        raise ValueError(f"{NAME} has {name}={value!r}: a request may lower this bound, which is {now!r}, not raise it")


def _is_number(values: Any) -> bool:
    return bool(values) and isinstance(values[0], int | float) and not isinstance(values[0], bool)

"""Reads a caller's image: a PIL image, a ``data:`` URL, a local file or an http(s) URL."""

from __future__ import annotations

import base64
import binascii
import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from jpaged.image_sources import ImageSources, MediaUrl, keep_pixels, known_pixels
from jpaged.images.pixels import Picture, decoded, is_pil, picture_of, shrunk
from jpaged.images.web import fetch

_SHOWN = 80
"""Most characters of a URL that an error repeats."""


LOW_DETAIL = 512
"""Pixels of the longest side of a picture of low detail, as OpenAI's models see it."""


@dataclass(frozen=True)
class LowDetail:
    """An image that is shrunk to `LOW_DETAIL` before it is prepared, so that models of many sizes spend less on it.

    Attributes:
        image: see `read_images`.
    """

    image: Any


def kept_url(item: Any) -> Any:
    """Return an image or a video with its URL as a `MediaUrl`; others unchanged."""
    if isinstance(item, LowDetail):
        return LowDetail(kept_url(item.image))
    return MediaUrl.of(item) if isinstance(item, str) and not isinstance(item, MediaUrl) else item


def forget_url(item: Any) -> None:
    """Forget what an image's or a video's `MediaUrl` keeps, if it has one."""
    url = item.image if isinstance(item, LowDetail) else item
    if isinstance(url, MediaUrl):
        url.forget()


def read_images(images: Any, sources: ImageSources) -> list[Picture]:
    """Return the pictures that `images` name; nothing is read if they are too many.

    Args:
        images: a PIL image, a string, a path, a `LowDetail` of one, or a list of these. A string is a ``data:``,
            ``http(s):`` or ``file:`` URL, or else a path.
        sources: where they may come from and how large they may be.

    Raises:
        ValueError: there are too many, one or all together are too large, one is not allowed, corrupt, truncated,
            animated, of a type that is not read, or could not be fetched; the message names the image and the limit.
        TypeError: one is of another Python type.
        ImportError: Pillow is not installed.
    """
    given = list(images) if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
    if len(given) > sources.max_images:
        raise ValueError(f"{len(given)} images were given, the limit is max_images={sources.max_images}")
    pictures: list[Picture] = []
    num_pixels = 0
    for number, image in enumerate(given, start=1):
        place, is_low = f"image {number} of {len(given)}", isinstance(image, LowDetail)
        picture = _read(image.image if is_low else image, place, sources, num_pixels)
        height, width = picture.size
        num_pixels += height * width
        pictures.append(shrunk(picture, LOW_DETAIL) if is_low else picture)
    return pictures


def _read(image: Any, place: str, sources: ImageSources, num_before: int) -> Picture:
    """Return one picture; those before it have `num_before` pixels."""
    if isinstance(image, os.PathLike):
        path = os.fspath(image)
        image = os.fsdecode(path) if isinstance(path, bytes) else path
    if isinstance(image, str):
        known: Picture | None = known_pixels(image)
        if known is not None and num_before + math.prod(known.size) <= sources.max_total_pixels:
            return known
        name = f"{place}, {shown_url(image)}"
        data = bytes_of(image, name, sources)
        made = decoded(data, name, sources.max_pixels, num_before, sources.max_total_pixels)
        keep_pixels(image, made, made.pixels.nbytes)
        return made
    if is_pil(image):
        name = f"{place}, a PIL image"
        return picture_of(image, name, sources.max_pixels, num_before, sources.max_total_pixels)
    raise TypeError(f"{place} is a {type(image).__name__}; it must be a PIL image, a URL or a path")


def bytes_of(text: str, name: str, sources: ImageSources, kind: str = "image") -> bytes:
    """Return the bytes that a URL or a path names, at most `max_bytes` of the sources.

    Args:
        name: how errors name them.
        kind: the first part of their media type.

    Raises:
        ValueError: they are too many, not allowed, of another type, or could not be fetched.
    """
    try:
        scheme = urlsplit(text[:4096]).scheme
    except ValueError:
        scheme = ""
    if scheme == "data":
        return _data_url(text, name, sources.max_bytes, kind)
    if scheme in ("http", "https"):
        get = partial(fetch, text, name, sources, kind)
        return text.bytes_by(get) if isinstance(text, MediaUrl) else get()
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"{name} is a file of the host {parts.netloc!r}; only local files are read")
        return read_file(Path(unquote(parts.path)), name, sources)
    if scheme and text[len(scheme) :].startswith("://"):
        raise ValueError(f"{name} has the scheme {scheme!r}, which is not one of data, http, https, file")
    return read_file(Path(text), name, sources)


def _data_url(url: str, name: str, max_bytes: int, kind: str) -> bytes:
    """Return the bytes of ``data:image/...;base64,...``, or of another kind of media."""
    header, comma, body = url.partition(",")
    media, *parameters = header.removeprefix("data:").split(";")
    if not comma or "base64" not in [parameter.strip().lower() for parameter in parameters]:
        raise ValueError(f"{name} is not of the form data:{kind}/...;base64,...")
    if not media.strip().lower().startswith(f"{kind}/"):
        raise ValueError(f"{name} has the media type {media!r}, not {kind}/...")
    if len(body) * 3 // 4 > max_bytes + 2:
        raise ValueError(f"{name} has about {len(body) * 3 // 4} bytes, the limit is max_bytes={max_bytes}")
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name} is not valid base64: {error}") from error
    if len(data) > max_bytes:
        raise ValueError(f"{name} has {len(data)} bytes, the limit is max_bytes={max_bytes}")
    return data


def shown_url(text: str) -> str:
    """Return the beginning of a URL or a path, for errors."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def read_file(path: Path, name: str, sources: ImageSources) -> bytes:
    """Return the file's bytes.

    Links and ``..`` are followed before the folders are compared. The error does not reveal whether a file
    outside them exists. A process that may write to a named folder is trusted not to replace its folders by links
    during the check.

    Args:
        name: how errors name the image.

    Raises:
        ValueError: the file is in none of the folders, is missing, is not a regular file or is too large.
    """
    folders = [Path(folder) for folder in sources.folders]
    if not folders:
        raise ValueError(f"{name} is a local file, and ImageSources(folders=()) names no folder to read from")
    try:
        target = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name} is not a path that can be followed: {error}") from error
    if not any(target.is_relative_to(folder) for folder in folders):
        raise ValueError(f"{name} is not in folders={[str(folder) for folder in folders]}")
    try:
        # Without waiting for the other end of a pipe, and not through a link that was put there since.
        descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{name} is not a regular file")
            if status.st_size > sources.max_bytes:
                raise ValueError(f"{name} has {status.st_size} bytes, the limit is max_bytes={sources.max_bytes}")
            data = file.read(sources.max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{name} could not be read: {error.strerror}") from error
    if len(data) > sources.max_bytes:
        raise ValueError(f"{name} has more bytes than max_bytes={sources.max_bytes}")
    return data

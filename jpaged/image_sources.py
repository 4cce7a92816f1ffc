"""States where images may come from and how large they may be."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from jpaged.validation import integer, number, texts

_COUNTS = (
    "max_bytes",
    "max_pixels",
    "max_images",
    "max_total_pixels",
    "max_videos",
    "max_video_bytes",
    "max_frames",
)


@dataclass(frozen=True, kw_only=True)
class ImageSources:
    """Where images and videos may come from and how large they may be.

    PIL images and ``data:`` URLs are always taken. Local files and http(s) URLs are taken only from the folders and
    hosts named here, so by default from nowhere.

    Attributes:
        folders: local files may lie in these folders and below; links are followed first. Kept as resolved paths.
        hosts: http(s) URLs may name these hosts: ``"host"`` for the scheme's own port, ``"host:port"`` for another.
            A name that leads to a private address (loopback, local network, link-local) is refused unless that
            address is named here too.
        max_bytes: most bytes of an encoded image.
        max_pixels: most pixels of a decoded image, known from its header before anything is decoded.
        max_images: most images of one request.
        max_total_pixels: most pixels of all images of one request, each known from its header before it is decoded; and
            of the frames that are taken of all its videos.
        max_videos: most videos of one request.
        max_video_bytes: most bytes of an encoded video.
        max_seconds: most seconds of a video, known before anything is decoded.
        max_frames: most frames that are taken of a video.
        timeout: most seconds that fetching one URL may take, redirects included.

    Raises:
        ValueError: a folder does not exist, a host is none, or a limit is out of range.
    """

    folders: Sequence[str | os.PathLike[str]] = ()
    hosts: Sequence[str] = ()
    max_bytes: int = 20 * 2**20
    max_pixels: int = 50_000_000
    max_images: int = 16
    max_total_pixels: int = 100_000_000
    max_videos: int = 4
    max_video_bytes: int = 64 * 2**20
    max_seconds: float = 600.0
    max_frames: int = 256
    timeout: float = 10.0

    def __post_init__(self) -> None:
        for name in ("folders", "hosts"):
            if isinstance(getattr(self, name), str | os.PathLike):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a list")
        folders = texts("folders", [os.fspath(folder) for folder in self.folders])
        for folder in folders:
            if not Path(folder).is_dir():
                raise ValueError(f"folders={list(folders)}: {folder!r} is not a folder")
        hosts = texts("hosts", self.hosts)
        for host in hosts:
            if host_and_port(host) is None:
                raise ValueError(f"hosts={list(hosts)}: {host!r} is neither 'host' nor 'host:port'")
        object.__setattr__(self, "folders", tuple(Path(folder).resolve() for folder in folders))
        object.__setattr__(self, "hosts", hosts)
        for name in _COUNTS:
            object.__setattr__(self, name, integer(name, getattr(self, name), low=1))
        for name in ("timeout", "max_seconds"):
            object.__setattr__(self, name, number(name, getattr(self, name), low=0.0, open_low=True))

    def names_host(self, host: str, port: int, scheme: str) -> bool:
        """Return whether an http(s) URL may name this host and port."""
        own_port = DEFAULT_PORTS[scheme]
        return any((host, port) == (name, own_port if at is None else at) for name, at in self._named())

    def names_address(self, address: str) -> bool:
        """Return whether `address` itself is one of the hosts."""
        return any(name == address for name, _ in self._named())

    def _named(self) -> list[tuple[str, int | None]]:
        return [found for host in self.hosts if (found := host_and_port(host)) is not None]


MOST_KEPT_BYTES = 256 << 20
"""Bounds what all `MediaUrl`s of a process keep together: many requests may wait for their turn."""


class MediaUrl(str):
    """An http(s) URL of an image or a video that keeps what it names from the first fetch until it is forgotten.

    A conversation is read for its tokens, more often where it is cut, and then for its pixels: the media may be another
    one at each fetch. Beyond `MOST_KEPT_BYTES` it is fetched again.
    """

    _data: bytes | None = None
    _lock: ClassVar = threading.Lock()
    _keeping: ClassVar[WeakValueDictionary[int, MediaUrl]] = WeakValueDictionary()  # by id, as several may be equal

    @classmethod
    def of(cls, url: str) -> str:
        """Return a URL that keeps what it names; one of another scheme, which may hold its data, as it is."""
        return cls(url) if url[:8].lower().startswith(("http://", "https://")) else url

    def bytes_by(self, fetch: Callable[[], bytes]) -> bytes:
        """Return the bytes that it names; `fetch` is called if they are not kept."""
        if (data := self._data) is None:
            data = fetch()
            with self._lock:
                kept = sum(len(url._data or b"") for url in list(self._keeping.values()))
                if kept + len(data) <= MOST_KEPT_BYTES:
                    self._data, self._keeping[id(self)] = data, self
        return data

    def forget(self) -> None:
        """Keep nothing any longer. Call it once the pixels are read: a request may run for long."""
        self._data = None


MOST_DECODED_BYTES = 128 << 20
"""Bounds the pixels that one use of `decoded_once` keeps."""
_DECODED: ContextVar[dict[tuple[int, Any], tuple[str, Any, int]] | None] = ContextVar("decoded", default=None)


@contextmanager
def decoded_once() -> Iterator[None]:
    """Decode each URL's picture or video once within the context, up to `MOST_DECODED_BYTES` of pixels.

    A conversation that is cut is rendered for several lengths, which have the same pictures. A URL is known by its
    object, not by its characters, of which a ``data:`` URL has millions.
    """
    token = _DECODED.set({})
    try:
        yield
    finally:
        _DECODED.reset(token)


def known_pixels(url: str, settings: Any = None) -> Any:
    """Return what `keep_pixels` was given for a URL and settings within this use of `decoded_once`; None: nothing."""
    _, found, _ = (_DECODED.get() or {}).get((id(url), settings), (url, None, 0))
    return found


def keep_pixels(url: str, made: Any, num_bytes: int, settings: Any = None) -> None:
    """Keep what a URL decodes to, if there is a use of `decoded_once` and it has room."""
    kept = _DECODED.get()
    if kept is not None and sum(size for *_, size in kept.values()) + num_bytes <= MOST_DECODED_BYTES:
        kept[id(url), settings] = url, made, num_bytes


DEFAULT_PORTS = {"http": 80, "https": 443}
"""The port that a URL means without naming one."""


def host_and_port(entry: str) -> tuple[str, int | None] | None:
    """Return the lower-case name (or address, without brackets) and the port, or None where `entry` is no host."""
    try:
        parts = urlsplit(f"//{entry}")
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name or parts.netloc != entry or "@" in entry or any(character.isspace() for character in entry):
        return None
    return name, port

"""Reads byte ranges of a file at a URL: several at once, again after a broken connection, in bounded memory."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SCHEMES = ["https", "http", "s3", "gs"]
"""Beginnings of URLs that are read."""
BLOCK = 4 << 20
"""Bytes of one request. Small tensors that are neighbours share it; a large tensor is several, sent at once."""
AHEAD = 8
"""Blocks after the last one asked for that are fetched too, as the next tensor mostly lies there."""
_KEPT = 64
"""Blocks of all files that are kept: 256 MiB."""
_AT_ONCE = 16
ATTEMPTS = 6
"""How often a range is asked for, with growing pauses of at most 8 s between."""
_FIRST_PAUSE = 0.25
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses of a server that may answer later."""
_SILENCE = 60
"""Seconds without a byte after which a connection counts as broken."""

logger = logging.getLogger(__name__)


class Unusable(ValueError):
    """A server's answer cannot be used, however often it is asked."""


def is_url(name: str | Path) -> bool:
    """Tell whether a model's name is a URL of a scheme in `SCHEMES`."""
    return isinstance(name, str) and any(name.startswith(f"{scheme}://") for scheme in SCHEMES)


def without_secrets(url: str) -> str:
    """Return a URL for messages: without a user, a password and the signature of a presigned URL."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def file_system(url: str) -> AbstractFileSystem:
    """Return the file system of a URL.

    Raises:
        ValueError: the package that reads its scheme is not installed; names it.
    """
    import fsspec

    scheme = url.partition("://")[0]
    try:
        if scheme not in ("http", "https"):
            return fsspec.filesystem(scheme)
        from aiohttp import ClientTimeout

        waits = ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
        return fsspec.filesystem(scheme, client_kwargs={"timeout": waits, "trust_env": True})
    except ImportError as error:
        raise ValueError(
            f"model={without_secrets(url)!r}: {scheme}:// needs a package that is not installed ({error}): "
            "pip install '.[remote]' in a clone of jpaged"
        ) from error


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status that an error of a file system tells, or None."""
    absent = broken = False
    while error is not None:
        is_http = type(error).__module__.startswith("aiohttp")
        # gcsfs calls it code, which aiohttp has for bodies that it cannot parse, as of broken connections.
        if isinstance(found := getattr(error, "status", None if is_http else getattr(error, "code", None)), int):
            return found
        is_absent = isinstance(error, FileNotFoundError)
        # fsspec says that a file is not there where the connection broke too.
        broken |= not is_absent and (isinstance(error, OSError) or is_http)
        absent |= is_absent
        error = error.__cause__
    return 404 if absent and not broken else None


def with_retries(url: str, ask: Callable[[], Any]) -> Any:
    """Call `ask` until it succeeds, at most `ATTEMPTS` times.

    Raises:
        ValueError: it failed for a reason that will not pass, or too often; names the URL and the reason.
    """
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except Unusable:
            raise
        except Exception as error:  # each file system has errors of its own
            reason, status = _reason(error).replace(url, without_secrets(url)), status_of(error)
            final = status is not None or isinstance(error, PermissionError)
            if final and status not in _AGAIN:
                raise ValueError(f"{without_secrets(url)} cannot be read: {reason}") from error
            if attempt + 1 == ATTEMPTS:
                raise ValueError(f"{without_secrets(url)} cannot be read: {reason}, {ATTEMPTS} times") from error
            logger.info("%s: %s; asking again", without_secrets(url), reason)
            time.sleep(min(_FIRST_PAUSE * 2**attempt, 8.0))
    raise AssertionError("unreachable")


def _reason(error: BaseException) -> str:
    status = status_of(error)
    if status == 412:
        return "it was changed while it was read (HTTP 412)"
    if status is not None:
        return f"the server answered HTTP {status}"
    said = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


class RemoteBlocks:
    """Fetches and keeps blocks of several files. Its methods may be called from several threads at once.

    Args:
        seen: is called with the bytes of each answer.

    Attributes:
        fetched: bytes of all answers so far.
    """

    def __init__(self, seen: Callable[[int], None] = lambda count: None) -> None:
        self.seen = seen
        self.fetched = 0
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="jpaged-remote")

    def blocks(self, file: RemoteFile, first: int, last: int) -> list[Future[bytes]]:
        """Return blocks `first` to `last` of a file, which arrive at any time, and ask for those after them."""
        end = -(-file.size // BLOCK)
        with self._lock:
            asked = [self._block(file, number) for number in range(first, min(last + 1 + AHEAD, end))]
            while len(self._held) > max(_KEPT, len(asked)):
                self._held.popitem(last=False)
        return asked[: last + 1 - first]

    def _block(self, file: RemoteFile, number: int) -> Future[bytes]:
        key = (file.url, number)
        held = self._held.get(key)
        if held is None or (held.done() and (held.cancelled() or held.exception() is not None)):
            begin = number * BLOCK
            held = self._pool.submit(self._fetch, file, begin, min(begin + BLOCK, file.size))
            self._held[key] = held
        self._held.move_to_end(key)
        return held

    def _fetch(self, file: RemoteFile, begin: int, end: int) -> bytes:
        found = file.fetch(begin, end)
        with self._lock:
            self.fetched += len(found)
        self.seen(len(found))
        return found

    def close(self) -> None:
        """Forget all blocks, and those that have not been asked for yet; they are fetched again if they are used."""
        with self._lock:
            self._held.clear()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="jpaged-remote")


class RemoteFile:
    """A file at a URL, of which parts are read.

    Attributes:
        name: the last part of its path.
        size: in bytes.

    Raises:
        ValueError: it is not there, is refused, or its server tells no size; names it.
    """

    def __init__(self, url: str, files: AbstractFileSystem, blocks: RemoteBlocks) -> None:
        self.url, self._files, self._blocks = url, files, blocks
        self.name = Path(urlsplit(url).path).name
        info = with_retries(url, lambda: files.info(url))
        if info.get("size") is None or info.get("partial") is False:
            raise ValueError(f"{self} cannot be read in parts: its server gives no size, or no byte ranges")
        self.size: int = info["size"]
        self._options: dict[str, Any] = {}
        tag = info.get("ETag", "")
        if url.startswith("http") and tag.startswith('"'):  # a weak tag never matches
            self._options["headers"] = {"If-Match": tag}

    def __str__(self) -> str:
        return without_secrets(self.url)

    def fetch(self, begin: int, end: int) -> bytes:
        """Return bytes from `begin` up to `end`, by one request and more if the connection breaks.

        Raises:
            ValueError: the server refuses, or gives other bytes than asked for; names the file.
        """

        def ask() -> bytes:
            found = self._files.cat_file(self.url, start=begin, end=end, **self._options)
            if len(found) > end - begin:
                raise Unusable(f"{self} cannot be read in parts: its server ignores the byte range")
            if len(found) < end - begin:
                raise ConnectionError(f"bytes {begin} to {end} of {self.size} ended after {len(found)} bytes")
            return found

        return with_retries(self.url, ask)

    def read(self, begin: int, length: int) -> np.ndarray:
        """Return bytes as uint8 [length]. Raises ValueError like `fetch`."""
        if length == 0:
            return np.zeros(0, np.uint8)
        first, last = begin // BLOCK, (begin + length - 1) // BLOCK
        read = np.empty(length, np.uint8)
        # A window at a time: a tensor of gigabytes is not asked for, and held twice, as a whole.
        for start in range(first, last + 1, _AT_ONCE):
            stop = min(start + _AT_ONCE - 1, last)
            for number, block in enumerate(self._blocks.blocks(self, start, stop), start=start):
                at = number * BLOCK
                low, high = max(begin, at), min(begin + length, at + BLOCK)
                read[low - begin : high - begin] = np.frombuffer(block.result(), np.uint8)[low - at : high - at]
        return read


def size_of(file: Path | RemoteFile) -> int:
    """Return the size of a file in bytes."""
    return file.size if isinstance(file, RemoteFile) else file.stat().st_size


def bytes_of(file: Path | RemoteFile, begin: int, length: int) -> np.ndarray:
    """Return a part of a file as uint8 [length]: a read-only view of a file on disk, whose pages leave memory with the
    view, or what was fetched of another."""
    if isinstance(file, RemoteFile):
        return file.read(begin, length)
    return np.memmap(file, np.uint8, "r", begin, length).view(np.ndarray)

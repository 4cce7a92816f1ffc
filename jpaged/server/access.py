"""Decides which callers may do what: keys and their limits, and the access that each path needs."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.routing import Route

from jpaged.server.errors import ApiError
from jpaged.validation import boolean, number

_FIELDS = {"name", "key", "sha256", "salt", "requests_per_minute", "share", "admin"}


@dataclass(frozen=True)
class Key:
    """One key. Only its hash is stored.

    Attributes:
        name: its name in the log and in messages.
        digest: SHA-256 of the key.
        salt: cached prefixes are shared only with keys of the same salt. The default is the key's name, so that no key
            can infer another's prompts from the time to its first token.
        requests_per_minute: limit on requests in a minute, also in one burst; None: no limit.
        share: part of the places for waiting requests that the key may take, in (0, 1].
        admin: whether the key may read `/metrics` and `/memory`, which concern all callers.
    """

    name: str
    digest: bytes
    salt: str
    requests_per_minute: float | None = None
    share: float = 1.0
    admin: bool = False

    def __post_init__(self) -> None:
        if self.requests_per_minute is not None:
            number("requests_per_minute", self.requests_per_minute, low=0.0, open_low=True)
        number("share", self.share, low=0.0, high=1.0, open_low=True)
        boolean("admin", self.admin)

    @classmethod
    def of(cls, secret: str, name: str, *, admin: bool = False) -> Key:
        """Make a key without limits from its text.

        Raises:
            ValueError: the text is empty, or cannot be sent in a header.
        """
        return cls(name, _digest(secret), name, admin=admin)

    @classmethod
    def unnamed(cls, secret: str, *, admin: bool = False) -> Key:
        """Make a key without limits whose name derives from its text, so that no two keys share a name.

        Raises:
            ValueError: see `of`.
        """
        return cls.of(secret, f"{'admin' if admin else 'key'}-{_digest(secret).hex()[:8]}", admin=admin)


def find_key(keys: Sequence[Key], secret: str) -> Key | None:
    """Return the key with this text. The time does not depend on how much of a key was guessed."""
    asked, found = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest(), None
    for key in keys:
        if hmac.compare_digest(key.digest, asked):
            found = key
    return found


def read_keys(file: Path) -> tuple[Key, ...]:
    """Read a JSON file: a list of mappings with `name`, `key` or `sha256` (hexadecimal), and further fields of `Key`.

    Raises:
        ValueError: the file is invalid; the message names the entry, never a key.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--api-keys-file {file} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"--api-keys-file {file} must be a JSON list of keys: {error.msg}, {where}") from error
    except ValueError as error:
        raise ValueError(f"--api-keys-file {file} must be JSON in UTF-8: {type(error).__name__}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"--api-keys-file {file} must hold a list with at least 1 key")
    keys = tuple(_read_key(entry, f"--api-keys-file {file}, entry {i}") for i, entry in enumerate(entries))
    if len({key.name for key in keys}) < len(keys):
        raise ValueError(f"--api-keys-file {file} has two keys of one name")
    return keys


def _read_key(entry: Any, where: str) -> Key:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise ValueError(f"{where} must be a mapping with a 'name'")
    if unknown := entry.keys() - _FIELDS:
        raise ValueError(f"{where} has {sorted(unknown)}; known are {sorted(_FIELDS)}")
    if ("key" in entry) == ("sha256" in entry):
        raise ValueError(f"{where} needs either 'key' or 'sha256'")
    if "salt" in entry and not (isinstance(entry["salt"], str) and entry["salt"]):
        raise ValueError(f"{where} has a salt that is not a non-empty string")
    given = {name: entry[name] for name in ("requests_per_minute", "share", "admin") if name in entry}
    try:
        digest = _digest(entry["key"]) if "key" in entry else bytes.fromhex(entry["sha256"])
        if len(digest) != hashlib.sha256().digest_size:
            raise ValueError("sha256 must have 64 hexadecimal digits")
        return Key(entry["name"], digest, str(entry.get("salt", entry["name"])), **given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _digest(secret: str) -> bytes:
    if not isinstance(secret, str) or not secret or not secret.isascii() or not secret.isprintable():
        raise ValueError("an API key must be a non-empty text of printable ASCII")
    return hashlib.sha256(secret.encode()).digest()


class Rates:
    """A token bucket for each key with a rate: it refills at the rate and holds the requests of a minute.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, keys: Iterable[Key], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = {key.name: (self._most(key), clock()) for key in keys if key.requests_per_minute is not None}

    def take(self, key: Key) -> None:
        """Count a request.

        Raises:
            ApiError: 429, with the seconds until the next request is allowed.
        """
        if key.requests_per_minute is None:
            return
        left, since = self._left[key.name]
        now, each = self._clock(), 60 / key.requests_per_minute
        left = min(self._most(key), left + (now - since) / each)
        if left < 1:
            self._left[key.name] = left, now
            wait = math.ceil((1 - left) * each)
            raise ApiError(
                f"the key {key.name} may send {key.requests_per_minute:g} requests a minute; try again in {wait} s",
                status=429,
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )
        self._left[key.name] = left - 1, now

    @staticmethod
    def _most(key: Key) -> float:
        return max(1.0, key.requests_per_minute or 1.0)


_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
_ACCESS = "jpaged_access"


def open_to_all(endpoint: _Endpoint) -> _Endpoint:
    """Mark an endpoint as one that needs no key. Put it below the router's decorator."""
    setattr(endpoint, _ACCESS, "open")
    return endpoint


def admin_only(endpoint: _Endpoint) -> _Endpoint:
    """Mark an endpoint as one for the keys of admins, since it shows what concerns all callers."""
    setattr(endpoint, _ACCESS, "admin")
    return endpoint


class PathAccess:
    """Tells which paths of an app are open and which are for admins; all others need any key.

    Args:
        routers: the app's routers; `open_to_all` and `admin_only` mark their endpoints.
    """

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        self._marked: dict[str, list[re.Pattern[str]]] = {"open": [], "admin": []}
        for route in (route for router in routers for route in router.routes if isinstance(route, Route)):
            if mark := getattr(route.endpoint, _ACCESS, None):
                self._marked[mark].append(route.path_regex)

    def is_open(self, path: str) -> bool:
        """Tell whether a path needs no key."""
        return self._is("open", path)

    def is_for_admins(self, path: str) -> bool:
        """Tell whether a path is for the keys of admins."""
        return self._is("admin", path)

    def _is(self, mark: str, path: str) -> bool:
        return any(pattern.match(path) for pattern in self._marked[mark])

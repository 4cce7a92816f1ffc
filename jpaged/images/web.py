"""Fetches an http(s) URL of a host that a caller named, and of no other."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Timer
from time import monotonic
from urllib.parse import urljoin, urlsplit

from jpaged.image_sources import DEFAULT_PORTS, ImageSources

_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_UNTYPED = ("application/octet-stream", "binary/octet-stream")
"""Media types that say nothing, as stores of objects give them: the decoder tells what the bytes are."""
_PIECE = 1 << 16
"""Bytes that are read at once."""


@dataclass(frozen=True)
class _Target:
    """An allowed URL, taken apart."""

    scheme: str
    host: str
    port: int
    path: str


def fetch(url: str, name: str, sources: ImageSources, kind: str = "image") -> bytes:
    """Download the URL and return its bytes.

    A host's addresses are looked up once, checked, and the connection goes to one of those. Redirects are followed on
    the same host only. Proxies of the environment are not used.

    Args:
        name: how errors name the image.
        kind: the first part of the media type to take.

    Raises:
        ValueError: the host is not named, leads to a private address, redirects to another, sends what is no image or
            too many bytes, is too slow, or fails.
    """
    deadline = monotonic() + sources.timeout
    target = _allowed(url, name, sources)
    for _ in range(_MOST_REDIRECTS + 1):
        answer = _request(target, name, sources, deadline, kind)
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
        following = _allowed(url, name, sources)
        if following.host != target.host:
            raise ValueError(f"{name} redirects to another host, {following.host!r}")
        if (target.scheme, following.scheme) == ("https", "http"):
            raise ValueError(f"{name} redirects from https to http")
        target = following
    raise ValueError(f"{name} redirects more than {_MOST_REDIRECTS} times")


def _allowed(url: str, name: str, sources: ImageSources) -> _Target:
    """Return the URL's parts if its host is named."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{name} is not a URL: {error}") from error
    if parts.scheme not in DEFAULT_PORTS or not host:
        raise ValueError(f"{name} leads to {url!r}, which is not an http(s) URL")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{name} has a user name in its URL, which is not sent")
    if any(ord(character) <= 32 or ord(character) > 126 for character in url):
        raise ValueError(f"{name} has characters that a URL writes as %..")
    port = DEFAULT_PORTS[parts.scheme] if port is None else port
    if not sources.names_host(host, port, parts.scheme):
        raise ValueError(f"{name} is of {host}:{port}, which is not in hosts={list(sources.hosts)}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Target(parts.scheme, host, port, path)


def _request(target: _Target, name: str, sources: ImageSources, deadline: float, media: str) -> bytes | str:
    """Return the body, or where the host redirects to."""
    left = deadline - monotonic()
    late = ValueError(f"{name} took longer than timeout={sources.timeout:g} seconds")
    if left <= 0:
        raise late
    try:
        connected = _connect(target, name, sources, left)
        # The timeout of a socket is one read's: a host that sends a byte now and then would hold us for ever.
        timer = Timer(max(deadline - monotonic(), 0.001), _shut, [connected])
        timer.name, timer.daemon = "jpaged-late", True
        timer.start()
        try:
            if isinstance(connected, ssl.SSLSocket):
                connected.do_handshake()
            kind = HTTPSConnection if target.scheme == "https" else HTTPConnection
            connection = kind(target.host, target.port)
            connection.sock = connected
            connection.request("GET", target.path, headers={"Accept": f"{media}/*", "Accept-Encoding": "identity"})
            return _answer(connection.getresponse(), name, sources.max_bytes, media)
        finally:
            timer.cancel()
            connected.close()
    except (OSError, HTTPException) as error:
        if monotonic() >= deadline:
            raise late from error
        raise ValueError(f"{name} could not be fetched: {type(error).__name__}: {error}") from error


def _connect(target: _Target, name: str, sources: ImageSources, timeout: float) -> socket.socket:
    """Return a socket to the first address of the host that answers, once all of them are allowed."""
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        if is_private(address) and not sources.names_address(address):
            hosts = list(sources.hosts)
            raise ValueError(f"{name} leads to the private address {address}, which is not in hosts={hosts}")
    failure: OSError = OSError(f"{target.host} has no address")
    for address in addresses:
        try:
            plain = socket.create_connection((address, target.port), timeout=timeout)
        except OSError as error:
            failure = error
            continue
        if target.scheme == "http":
            return plain
        context = ssl.create_default_context()
        return context.wrap_socket(plain, server_hostname=target.host, do_handshake_on_connect=False)
    raise failure


def is_private(address: str) -> bool:
    """Return whether an IP address is not one of the public internet; also those that hide an IPv4 one in IPv6."""
    plain = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(plain, ipaddress.IPv6Address):
        inner = plain.ipv4_mapped or plain.sixtofour or (plain.teredo[1] if plain.teredo else None)
        if inner is None and plain in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(plain) & 0xFFFFFFFF)
        if inner is not None:
            return is_private(str(inner))
    return not plain.is_global or plain.is_multicast


def _answer(response: HTTPResponse, name: str, max_bytes: int, kind: str) -> bytes | str:
    if response.status in _REDIRECTS and (location := response.getheader("Location")):
        return location
    if response.status != 200:
        raise ValueError(f"{name} could not be fetched: status {response.status} {response.reason}")
    media = response.getheader("Content-Type", "")
    plain = media.partition(";")[0].strip().lower()
    if not plain.startswith(f"{kind}/") and plain not in _UNTYPED:
        raise ValueError(f"{name} has the media type {media!r}, not {kind}/...")
    if (encoding := response.getheader("Content-Encoding", "identity")).lower() != "identity":
        raise ValueError(f"{name} was sent in the encoding {encoding!r}, which was not asked for")
    if response.length is not None and response.length > max_bytes:
        raise ValueError(f"{name} has {response.length} bytes, the limit is max_bytes={max_bytes}")
    pieces, size = [], 0
    while piece := response.read1(_PIECE):
        size += len(piece)
        if size > max_bytes:
            raise ValueError(f"{name} has more bytes than max_bytes={max_bytes}")
        pieces.append(piece)
    if response.length:
        raise HTTPException(f"the connection ended {response.length} bytes too early")
    return b"".join(pieces)


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)

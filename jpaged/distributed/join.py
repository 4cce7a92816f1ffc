"""Lets the processes of a run find each other.

`jax.distributed.initialize` has brought them together before: its coordinator, in process 0, hands out the port and
the secret with which the others reach the leader. What they say is not encrypted: like jax's own traffic it belongs
in the private network of one job.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from typing import Any

import jax

from jpaged.config import EngineConfig
from jpaged.distributed.connection import MAX_SILENCES, read_frame, write_frame
from jpaged.distributed.follower import Follower
from jpaged.distributed.leader import Leader

JOIN_SECONDS = 300
"""Time that processes wait for each other to make their `LLM`."""

_KEY = "jpaged/leader"
_HELLO_BYTES = 1 << 16
_joined = False


def join(config: EngineConfig) -> Leader | Follower | None:
    """Find the other processes of the run, if it has several; returns this process's part, or None in a run of one.

    Raises:
        ValueError: the processes have other settings.
        RuntimeError: this process has joined before: its followers are gone with the script they ran.
        TimeoutError: some process did not come within `JOIN_SECONDS`.
    """
    global _joined
    if jax.process_count() == 1:
        return None
    if _joined:
        raise RuntimeError("a run of several processes has one LLM, and this process has made it already")
    _joined = True
    settings = repr(config)
    return _gather(settings) if jax.process_index() == 0 else _connect(settings)


def _gather(settings: str) -> Leader:
    """Wait for all followers."""
    token, peers = secrets.token_hex(16), dict[int, socket.socket]()
    deadline = time.monotonic() + JOIN_SECONDS
    with _listen() as server:
        _coordinator().client.key_value_set(_KEY, json.dumps([server.getsockname()[1], token]))
        while len(peers) < jax.process_count() - 1:
            missing = sorted(set(range(1, jax.process_count())) - set(peers))
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                peer, _ = server.accept()
            except TimeoutError as error:
                raise TimeoutError(f"processes {missing} made no LLM within {JOIN_SECONDS} seconds") from error
            process = _greet(peer, token, settings)
            if process is not None:
                peers[process] = peer
    return Leader(peers)


def _greet(peer: socket.socket, token: str, settings: str) -> int | None:
    """Greet a process that connects; return which follower it is, or None for a stranger."""
    try:
        hello = json.loads(read_frame(peer, MAX_SILENCES, _HELLO_BYTES))
    except (OSError, ValueError, RecursionError):
        hello = None
    if not _is_known(hello, token):
        peer.close()
        return None
    _, process, theirs = hello
    agreed = theirs == settings
    write_frame(peer, json.dumps([agreed, settings]).encode(), threading.Lock())
    if not agreed:
        raise ValueError(f"process {process} was given {theirs}, process 0 {settings}")
    return process


def _is_known(hello: Any, token: str) -> bool:
    """Tell whether a first message is a follower's: [the token, its number, its settings]."""
    match hello:
        case [str(known), int(), str()]:
            return hmac.compare_digest(known.encode("utf-8", "surrogatepass"), token.encode())
    return False


def _connect(settings: str) -> Follower:
    port, token = json.loads(_coordinator().client.blocking_key_value_get(_KEY, JOIN_SECONDS * 1000))
    host = _coordinator().coordinator_address.rsplit(":", 1)[0].strip("[]")
    peer = socket.create_connection((host, port), timeout=JOIN_SECONDS)
    hello = json.dumps([token, jax.process_index(), settings]).encode()
    write_frame(peer, hello, threading.Lock())
    agreed, leaders = json.loads(read_frame(peer, MAX_SILENCES, _HELLO_BYTES))
    if not agreed:
        raise ValueError(f"process 0 was given {leaders}, process {jax.process_index()} {settings}")
    return Follower(peer)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _coordinator() -> Any:
    """Return the coordinator's address and a client of its key-value store; jax has no public name for them."""
    from jax._src.distributed import global_state

    return global_state

"""Runs process 0, which decides, and announces each device call before it makes it."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Mapping
from functools import partial
from queue import Queue
from typing import Any

from jpaged.distributed.connection import Connection
from jpaged.distributed.watch import Watch
from jpaged.execution import Runner
from jpaged.execution.wire import decode, encode


class Leader:
    """Speaks to all followers. They learn of the end when the interpreter exits.

    Args:
        peers: an open socket to each follower, by process number.
    """

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        self._watch = Watch()
        self._values: Queue[int | None] = Queue()
        self._hosts = {process: peer.getpeername()[0].removeprefix("::ffff:") for process, peer in peers.items()}
        self._followers = {
            process: Connection(peer, partial(self._hear, process), partial(self._lose, process))
            for process, peer in peers.items()
        }
        for follower in self._followers.values():
            follower.start()
        atexit.register(self.close)

    def smallest(self, value: int) -> int:
        """Return the least of all processes' values.

        Raises:
            ProcessLost: one of them is gone.
        """
        for _ in self._followers:
            other = self._values.get()
            self._watch.check()
            assert other is not None
            value = min(value, other)
        self._send(encode("value", (value,)))
        return value

    def lead(self, runner: Runner) -> None:
        """Repeat the runner's device calls on the followers from now on."""
        runner.worker.announce = self._announce
        runner.worker.failed = self._end_run
        runner.worker.fetch = self._watch.fetch

    def fail(self, error: BaseException) -> None:
        """Tell the followers that this process could not go on."""
        self._send(encode("failed", (_failure(error),)))

    def close(self) -> None:
        """Tell the followers to end."""
        for follower in self._followers.values():
            follower.close(encode("end", ()))

    def _announce(self, name: str, args: tuple[Any, ...]) -> None:
        self._watch.check()
        self._send(encode(name, args))

    def _end_run(self, error: BaseException) -> None:
        """End the run after a device call that failed here: the followers have made it, and would be a call ahead.

        Raises:
            ProcessLost: another process was lost, which explains it.
        """
        if isinstance(error, Exception):
            self._watch.wait_for_news()
        self.fail(error)
        self._watch.lose(_failure(error))

    def _send(self, message: bytes) -> None:
        for follower in self._followers.values():
            follower.send(message)

    def _hear(self, process: int, message: bytes) -> None:
        name, (content,) = decode(message)
        if name == "failed":
            self._lose(process, f"failed: {content}")
        else:
            self._values.put(content)

    def _lose(self, process: int, what: str) -> None:
        message = f"process {process} on {self._hosts[process]} {what}"
        self._watch.lose(message)
        self._values.put(None)
        self._send(encode("failed", (message,)))


def _failure(error: BaseException) -> str:
    return f"process 0 failed: {error!r}"

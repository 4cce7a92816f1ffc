"""Runs the other processes, which repeat the device calls of process 0."""

from __future__ import annotations

import socket
from queue import SimpleQueue
from typing import Any, Never

from jpaged.distributed.connection import Connection
from jpaged.distributed.watch import Watch
from jpaged.execution import Runner
from jpaged.execution.wire import decode, encode


class Follower:
    """Listens to the leader.

    Args:
        peer: an open socket to it.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._watch = Watch()
        self._messages: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        self._host = peer.getpeername()[0]
        self._leader = Connection(peer, self._hear, self._lose)
        self._leader.start()

    def smallest(self, value: int) -> int:
        """Return the least of all processes' values; see `Leader`.

        Raises:
            SystemExit: the leader ended.
        """
        self._leader.send(encode("value", (value,)))
        name, args = self._next()
        if name == "end":
            raise SystemExit(0)
        (value,) = args
        return value

    def follow(self, runner: Runner) -> Never:
        """Make the leader's device calls until it ends.

        Raises:
            SystemExit: the leader ended.
            ProcessLost: a process is gone.
            ValueError: the leader sent an unknown device call.
        """
        while True:
            name, args = self._next()
            if name == "end":
                raise SystemExit(0)
            if name == "warmup":
                for _ in runner.warmup():
                    pass
            else:
                self._make_call(runner, name, args)

    def _make_call(self, runner: Runner, name: str, args: tuple[Any, ...]) -> None:
        try:
            runner.worker.make_call(name, args)
        except ValueError:  # the call is none: no device was asked
            raise
        except Exception:
            self._watch.wait_for_news()
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the leader that this process could not go on."""
        if not self._watch.lost:
            self._leader.send(encode("failed", (repr(error),)))

    def _next(self) -> tuple[str, tuple[Any, ...]]:
        message = self._messages.get()
        self._watch.check()
        return message

    def _hear(self, message: bytes) -> None:
        name, args = decode(message)
        if name == "failed":
            self._watch.lose(args[0])
        elif name == "end":
            self._leader.close()
        self._messages.put((name, args))

    def _lose(self, what: str) -> None:
        self._watch.lose(f"process 0 on {self._host} {what}")
        self._messages.put(("failed", ()))

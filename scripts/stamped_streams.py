"""A client of streamed completions that learns from the kernel when each piece arrived, and reads it afterwards. Linux.

When the client itself gets a core to look at its sockets is none of the server's doing: on a machine that computes
with all its cores that is up to a tick of the scheduler later.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

SO_TIMESTAMPNS = 35
"""Option of a socket that makes `recvmsg` tell when its bytes arrived; `socket` has no name for it (socket(7))."""


class Stream:
    """One answer as it comes.

    Args:
        address: host and port of the server.
        request: what is sent, head and body.
        offset: seconds from `time.perf_counter`'s clock to the system's.

    Attributes:
        ended: is done when nothing more comes.
    """

    def __init__(self, address: tuple[str, int], request: bytes, offset: float) -> None:
        self._offset = offset
        self._pieces: list[tuple[float, bytes]] = []
        self._loop = asyncio.get_running_loop()
        self.ended = self._loop.create_future()
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.sendall(request)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._read)

    def _read(self) -> None:
        try:
            data, said, _, _ = self._socket.recvmsg(2**16, socket.CMSG_SPACE(16))
        except BlockingIOError:
            return
        stamps = [struct.unpack("qq", value) for level, kind, value in said if kind == SO_TIMESTAMPNS]
        at = stamps[0][0] + 1e-9 * stamps[0][1] - self._offset if stamps else time.perf_counter()
        self._pieces.append((at, data))
        if not data or b"[DONE]" in data:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self.ended.set_result(None)

    def result(self) -> tuple[list[float], int]:
        """Return when each piece with a token arrived, on `time.perf_counter`'s clock, and the tokens that the server
        counted.

        Raises:
            RuntimeError: the stream did not come to its end.
        """
        answer = b"".join(data for _, data in self._pieces)
        if b"[DONE]" not in answer:
            raise RuntimeError(f"a stream did not end: {answer[-300:]!r}")
        last = json.loads(answer.rsplit(b"data: ", 2)[1].split(b"\n")[0])
        return [at for at, data in self._pieces if b'"text":' in data], last["usage"]["completion_tokens"]


async def ask_all(url: str, prompts: Sequence[str], tokens: int) -> tuple[float, list[list[float]]]:
    """Ask for all prompts at once; return the seconds until all are answered, and when the tokens of each came.

    Raises:
        RuntimeError: an answer has not so many tokens.
    """
    host, port = urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80
    fixed = {"model": "m", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    fixed["stream_options"] = {"include_usage": True}
    requests = []
    for prompt in prompts:
        body = json.dumps(fixed | {"prompt": prompt}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        requests.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    offset = time.time() - time.perf_counter()
    start = time.perf_counter()
    streams = [Stream((host, port), request, offset) for request in requests]
    await asyncio.gather(*(stream.ended for stream in streams))
    seconds = time.perf_counter() - start
    answers = [stream.result() for stream in streams]
    if any(count != tokens for _, count in answers):
        raise RuntimeError(f"streams had {sorted({count for _, count in answers})} tokens, not {tokens}")
    return seconds, [times for times, _ in answers]

"""A local server of files that answers ranges late, breaks connections and refuses, as a test or a benchmark asks."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit
from zlib import crc32


class RangeServer:
    """Serves a folder.

    Attributes:
        url: of the folder.
        latency: seconds before each answer.
        bandwidth: bytes a second of one connection; None = as many as there can be.
        breaks: how often, from now, the connection of a range breaks after half of the bytes.
        headers: further headers of each file.
        refused: name -> status of the answers to its ranges.
        absent: status of the answers for files that are not there.
        authorization: the header that a request must have, else the answer is 401; None = none.
        no_ranges: whether ranges are ignored.
        gets, sent: how often each name was fetched, and how many bytes of it were sent.
        most_at_once: most requests that were answered at one time.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.bandwidth: float | None = None
        self.authorization: str | None = None
        self.latency, self.breaks, self.absent, self.no_ranges = 0.0, 0, 404, False
        self.headers: dict[str, str] = {}
        self.refused: dict[str, int] = {}
        self.gets: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()


@contextmanager
def serving(folder: Path) -> Iterator[RangeServer]:
    """Serve a folder at a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            with state.lock:
                state.at_once += 1
                state.most_at_once = max(state.most_at_once, state.at_once)
            try:
                self._answer(body=True)
            finally:
                with state.lock:
                    state.at_once -= 1

        def _answer(self, body: bool) -> None:
            time.sleep(state.latency)
            name = unquote(urlsplit(self.path).path).lstrip("/")
            file = folder / name
            if state.authorization is not None and self.headers.get("Authorization") != state.authorization:
                return self._plain(401)
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked and name in state.refused:
                return self._plain(state.refused[name])
            if not file.is_file():
                return self._plain(state.absent)
            # Files written in one tick of the clock have the same time.
            size, tag = file.stat().st_size, f'"{file.stat().st_mtime_ns:x}-{crc32(name.encode()):x}"'
            if self.headers.get("If-Match", tag) != tag:
                return self._plain(412)
            begin, end = 0, size
            if asked and not state.no_ranges:
                begin, end = int(asked[1]), min(int(asked[2]) + 1, size)
            self.send_response(206 if asked and not state.no_ranges else 200)
            self.send_header("Content-Length", str(end - begin))
            for header, value in {"ETag": tag, **state.headers}.items():
                self.send_header(header, value)
            self.end_headers()
            if not body:
                return None
            with state.lock:
                state.gets[name] += 1
                breaks = asked is not None and state.breaks > 0
                state.breaks -= breaks
            with file.open("rb") as stream:
                stream.seek(begin)
                data = stream.read(end - begin)
            if breaks:
                data = data[: len(data) // 2]
                self.close_connection = True
            if state.bandwidth is not None:
                time.sleep(len(data) / state.bandwidth)
            self.wfile.write(data)
            with state.lock:
                state.sent[name] += len(data)
            return None

        def _plain(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state = RangeServer(folder, f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()

"""A pseudo-terminal for a test: types lines to a process, and keeps what a person would see."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Sequence

COLUMNS, ROWS = 100, 40
_PIECE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]|\x1b[()=>78].?|[\r\n\b\a]|[^\x1b\r\n\b\a]+|\x1b")


class Screen:
    """The lines that a terminal shows, with those that have scrolled away; dimmed text is in «angle marks»."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = [[]]
        self._row = self._column = 0
        self._dim = False

    def write(self, text: str) -> None:
        for piece in _PIECE.findall(text):
            if piece == "\r":
                self._column = 0
            elif piece == "\n":
                self._row += 1
                self.lines += [[] for _ in range(self._row + 1 - len(self.lines))]
            elif piece == "\b":
                self._column = max(0, self._column - 1)
            elif piece.startswith("\x1b["):
                self._control(piece[2:-1], piece[-1])
            elif piece[0] not in "\x1b\a":
                self._print(piece)

    def _control(self, given: str, kind: str) -> None:
        count = int(given) if given.isdigit() else 1
        line = self.lines[self._row]
        if kind == "m":
            self._dim = "2" in given.split(";") or (self._dim and given not in ("0", ""))
        elif kind == "A":
            self._row = max(0, self._row - count)
        elif kind == "B":
            self._row = min(len(self.lines) - 1, self._row + count)
        elif kind == "C":
            self._column += count
        elif kind == "D":
            self._column = max(0, self._column - count)
        elif kind == "K":
            del line[self._column :]
        elif kind == "J":
            del line[self._column :], self.lines[self._row + 1 :]

    def _print(self, text: str) -> None:
        line = self.lines[self._row]
        line += [" "] * (self._column - len(line))
        line[self._column : self._column + len(text)] = [f"«{c}»" if self._dim else c for c in text]
        self._column += len(text)

    @property
    def text(self) -> str:
        return "\n".join("".join(line).replace("»«", "").rstrip() for line in self.lines)


class Terminal:
    """Runs a process in a pseudo-terminal."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=env | size,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.screen = Screen()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Read until the screen shows a text after what it showed at the last wait."""
        end = time.monotonic() + seconds
        while text not in self.screen.text[self._seen :]:
            if time.monotonic() > end or not self._read(end):
                raise AssertionError(f"no {text!r} on the screen:\n{self.screen.text}")
        self._seen = self.screen.text.index(text, self._seen) + len(text)

    _seen = 0

    def end(self) -> int:
        """Read to the end of the process and return its status."""
        while self._read(time.monotonic() + 60):
            pass
        os.close(self._master)
        return self.process.wait(60)

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
        try:
            data = os.read(self._master, 65536) if ready else b""
        except OSError:  # the process has ended
            return False
        self.screen.write(data.decode(errors="replace"))
        return bool(data)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

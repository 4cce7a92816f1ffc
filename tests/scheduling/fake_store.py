"""A tier's store made of a dictionary, whose reads are done some steps later."""

from __future__ import annotations

from collections.abc import Hashable

from jpaged.memory import TierRead


class FakeStore:
    """Keeps what blocks hold by place and name. A read is done after so many more steps as `delay` says."""

    def __init__(self, delay: int = 0) -> None:
        self.delay = delay
        self.is_open = True
        self.num_queued_bytes = 0
        self.kept: dict[int, tuple[bytes, list[Hashable]]] = {}
        self.reads: list[tuple[int, TierRead]] = []
        self.num_read = self.num_written = 0

    def write(self, place: int, name: bytes, content: list[Hashable]) -> None:
        self.num_written += 1
        self.kept[place] = name, content

    def read(self, read: TierRead) -> None:
        for block, name in zip(read.blocks, read.names, strict=True):
            there, content = self.kept.get(block.place, (b"", []))
            if there == name:
                read.contents[block.group, block.digest] = content
                self.num_read += 1
            else:
                read.damaged.append(block)
        self.reads.append((self.delay, read))
        self._finish()

    def step(self) -> None:
        self.reads = [(delay - 1, read) for delay, read in self.reads]
        self._finish()

    def _finish(self) -> None:
        for delay, read in self.reads:
            if delay <= 0:
                read.finish()
        self.reads = [(delay, read) for delay, read in self.reads if delay > 0]

    def forget_all(self) -> None:
        self.kept.clear()

    def give_back(self, place: int, num_bytes: int) -> None:
        self.kept = {other: kept for other, kept in self.kept.items() if not place <= other < place + num_bytes}

"""Tells what a model thinks, between ``<think>`` and ``</think>``, apart from what it says."""

from __future__ import annotations

from jpaged.server.message.parts import Part, Reader, Reasoning

BEGIN, END = "<think>", "</think>"


class ThinkReader:
    """Reads an output that may begin with thoughts.

    Args:
        said: reads what comes behind them.
        inside: whether the prompt ended with `BEGIN`, so that the output begins with a thought.

    Attributes:
        thought_length: characters of the output up to the end of its thought, marks included; 0 = there is no thought,
            None = that is not known yet, or the thought goes on.
    """

    def __init__(self, said: Reader, *, inside: bool) -> None:
        self._said = said
        self._held = ""
        self._inside: bool | None = inside or None
        self._behind = False
        self._trim = False
        self._starts = True
        self._num_read = 0
        self.thought_length: int | None = None

    def push(self, text: str) -> list[Part]:
        if self._behind:
            return self._said.push(self._trimmed(text))
        self._held += text
        self._num_read += len(text)
        if self._inside is None:  # it is not clear yet whether there is a thought
            begun = self._held.lstrip()
            if begun.startswith(BEGIN):
                self._inside, self._held = True, begun.removeprefix(BEGIN)
            elif BEGIN.startswith(begun):
                return []
            else:
                self._behind, self.thought_length = True, 0
                return self._said.push(self._take(len(self._held)))
        if self._starts and self._held:
            self._held, self._starts = self._held.removeprefix("\n"), False
        at = self._held.find(END)
        if at < 0:
            thought = self._take(len(self._held) - held_back(self._held, END))
            return [Reasoning(thought)] if thought else []
        thought = self._take(at)
        self._behind = self._trim = True
        self.thought_length = self._num_read - len(self._held) + len(END)
        parts: list[Part] = [Reasoning(thought)] if thought else []
        return parts + self._said.push(self._trimmed(self._take(len(self._held))[len(END) :]))

    def finish(self) -> list[Part]:
        rest = self._take(len(self._held))
        if self._inside and not self._behind:
            return [Reasoning(rest)] if rest else []
        if self.thought_length is None:
            self.thought_length = 0
        return [*self._said.push(rest), *self._said.finish()]

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _trimmed(self, text: str) -> str:
        """Leave out the white space between a thought and what is said."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


def held_back(text: str, mark: str) -> int:
    """Return how many of the last characters of a text could be the beginning of a mark.

    >>> held_back("so <thi", "<think>")
    4
    """
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)

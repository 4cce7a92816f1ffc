"""Defines the parts of an answer, the interface of readers, and the reader of plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of a thought that precedes the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a tool call; its arguments follow.

    Attributes:
        index: number of the call in the answer, from 0.
        name: the function's name.
    """

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallCut:
    """The end of an output within a tool call, by a stop string or a limit: the call is not one to carry out."""


Part = Content | Reasoning | CallStart | CallArguments | CallCut


class Reader(Protocol):
    """Interface of a reader of one output."""

    def push(self, text: str) -> list[Part]:
        """Read more text; return the parts that no later text can change."""
        ...

    def finish(self) -> list[Part]:
        """Return the text held back so far, at the end of the output."""
        ...


class PlainReader:
    """Treats all text as content."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def held_back(text: str, mark: str) -> int:
    """Return how many of the last characters of a text could be the beginning of a mark.

    >>> held_back("so <thi", "<think>")
    4
    """
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)

"""The parts of an answer, and the reader of models whose answers have one part only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """Text that is said."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that was thought before."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool is called; its arguments follow.

    Attributes:
        index: number of the call in the answer, from 0.
        name: the function's name.
    """

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


class Reader(Protocol):
    """Reads one output."""

    def push(self, text: str) -> list[Part]:
        """Take in more text; return the parts that no later text can change."""
        ...

    def finish(self) -> list[Part]:
        """Return what was held back, when no more text comes."""
        ...


class PlainReader:
    """Takes everything for content."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []

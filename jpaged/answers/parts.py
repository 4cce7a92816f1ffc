"""Defines the parts of an answer and the interface of its readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jpaged.outputs import TokenSpan


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of a thought."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a tool call; its arguments follow.

    Attributes:
        index: number of the call in the answer, from 0.
        name: the function's name.
        call_id: the id that the model gave the call before its arguments; None: it gave none.
    """

    index: int
    name: str
    call_id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call whose arguments are whole."""

    index: int


@dataclass(frozen=True)
class CallCut:
    """The end of an output within a tool call, by a stop string or a limit: the call is not one to carry out."""


Part = Content | Reasoning | CallStart | CallArguments | CallEnd | CallCut


class Reader(Protocol):
    """Interface of a reader of one output."""

    def push(self, text: str, spans: Sequence[TokenSpan] = ()) -> list[Part]:
        """Read more text; return the parts that no later text can change.

        Args:
            spans: where in this text tokens with a meaning of their own stand.
        """
        ...

    def finish(self) -> list[Part]:
        """Return the text held back so far, at the end of the output."""
        ...


class PlainReader:
    """Treats all text as content."""

    def push(self, text: str, spans: Sequence[TokenSpan] = ()) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []

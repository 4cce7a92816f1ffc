"""The parts of an answer, under the names that the server's modules use."""

from __future__ import annotations

from jpaged.answers.parts import (
    CallArguments,
    CallCut,
    CallEnd,
    CallStart,
    Content,
    Part,
    PlainReader,
    Reader,
    Reasoning,
)

__all__ = [
    "CallArguments",
    "CallCut",
    "CallEnd",
    "CallStart",
    "Content",
    "Part",
    "PlainReader",
    "Reader",
    "Reasoning",
]

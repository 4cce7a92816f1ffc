"""The form of a model family's answers: one row of `rows.ANSWER_FORMATS`.

An answer is made of regions: thoughts, text and tool calls. A row says by which marks each begins and ends; reader and
grammar are made from it, and nothing else knows a family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jpaged.answers.notations import Json, Notation

JSON_CALL = '{"name": "$name", "arguments": $arguments}'
_OPTIONAL = re.compile(r"«(.*?)»", re.DOTALL)


@dataclass(frozen=True)
class Region:
    """A thought, or the text of an answer.

    Attributes:
        begin: marks of which any begins the region.
        end: marks of which any ends it.
        anywhere: whether it may begin amid text; otherwise at the beginning of an answer and after a thought or call.
    """

    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    anywhere: bool = False


@dataclass(frozen=True)
class Calls:
    """One way to write calls.

    Attributes:
        begin: the mark before the first call; "": an answer that begins with a call is nothing but calls.
        call: one call. ``$name``, ``$id`` and ``$arguments`` stand for its parts; what stands between « and » may be
            absent.
        opening, between, closing: the marks after `begin`, between two calls and after the last.
        notation: notation of the arguments.
        before: tokens that may precede a call without `begin`.
        is_read_only: whether models write it at times, but are not led to by a grammar.
    """

    begin: str
    call: str = JSON_CALL
    opening: str = ""
    between: str = ""
    closing: str = ""
    notation: Notation = field(default_factory=Json)
    before: tuple[str, ...] = ()
    is_read_only: bool = False

    @property
    def head(self) -> str:
        """Return the text of a call before its arguments."""
        return self.call.partition("$arguments")[0]

    @property
    def tail(self) -> str:
        """Return the text of a call after its arguments."""
        return self.call.partition("$arguments")[2]

    @property
    def is_json(self) -> bool:
        """Tell whether a call is a JSON object of its name and its arguments."""
        return self.call.startswith("{")


@dataclass(frozen=True)
class AnswerFormat:
    """The form of a family's answers.

    Attributes:
        thought: the region of thoughts; None: there are none.
        text: the marks around text, where a family has such.
        calls: ways to write calls, the usual one first; none: the family has no calls.
        skipped: marks between regions, without a meaning of their own.
        ends: tokens that end the turn besides the model's end-of-sequence tokens.
        variant_of: the format whose name also means this one, in a tokenizer with the token `variant_token`.
    """

    thought: Region | None = None
    text: Region = Region()
    calls: tuple[Calls, ...] = ()
    skipped: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    variant_of: str = ""
    variant_token: str = ""

    def texts(self) -> Iterator[str]:
        """Yield all literal texts of the format, in which its marks are."""
        for region in (self.thought, self.text):
            if region is not None:
                yield from (*region.begin, *region.end)
        for calls in self.calls:
            yield from (calls.begin, calls.opening, calls.between, calls.closing, *calls.before)
            yield from re.split(r"\$\w+|[«»]", calls.call)
            notation = calls.notation
            yield from re.split(r"\$\w+", getattr(notation, "form", ""))
            yield from (mark for pair in getattr(notation, "quotes", ()) for mark in pair)
        yield from (*self.skipped, *self.ends)

    def with_thoughts_of(self, other: AnswerFormat | None) -> AnswerFormat:
        """Return the format with the thoughts of another one; None: without thoughts."""
        return replace(self, thought=None if other is None else other.thought)


def pieces_of(template: str) -> list[tuple[str, bool]]:
    """Return a template's texts in order, each with whether it may be absent.

    >>> pieces_of("a«b»c")
    [('a', False), ('b', True), ('c', False)]
    """
    return [(text, i % 2 == 1) for i, text in enumerate(_OPTIONAL.split(template)) if text]

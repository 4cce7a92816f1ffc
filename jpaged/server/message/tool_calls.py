"""Reads tool calls out of a model's text as it grows."""

from __future__ import annotations

import json
import re
from enum import Enum

from jpaged.server.message.parts import CallArguments, CallStart, Content, Part
from jpaged.server.message.reasoning import held_back
from jpaged.server.message.tool_formats import ToolFormat

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

_NAME = r"\s*([\w.-]+)\s*"
"""A call's name where it stands alone."""


class _At(Enum):
    """Where in an output the reader is."""

    TEXT = "before a call"
    HEAD = "between a call's beginning and its arguments"
    ARGUMENTS = "in a call's arguments"
    TAIL = "behind a call"


class ToolReader:
    """Reads one output; text that looks like a call and is none is content.

    Args:
        form: how the model's family writes calls.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._at = _At.TEXT
        self._held = ""
        self._begun = ""  # what is content after all if no call follows
        self._num_calls = 0
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        rest, self._held = self._begun + self._held, ""
        if self._at in (_At.TEXT, _At.HEAD) and rest.strip() and not (self._num_calls and self._at is _At.HEAD):
            return [Content(rest)]
        return []

    def _step(self, parts: list[Part]) -> bool:
        """Go on as far as one thing is settled; tell whether more may be."""
        if self._at is _At.TEXT:
            return self._text(parts)
        if self._at is _At.HEAD:
            return self._head(parts)
        if self._at is _At.ARGUMENTS:
            return self._arguments(parts)
        return self._tail()

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _text(self, parts: list[Part]) -> bool:
        begin = self._form.begin
        if not begin:
            return self._first(parts)
        at = self._held.find(begin)
        said = self._take(at if at >= 0 else len(self._held) - held_back(self._held, begin))
        if self._num_calls:
            said = said.strip()
        if said:
            parts.append(Content(said))
        if at < 0:
            return False
        self._begun = self._take(len(begin))
        self._at = _At.HEAD
        return True

    def _first(self, parts: list[Part]) -> bool:
        """Tell by its beginning whether a whole output is calls."""
        if self._num_calls < 0:
            parts += [Content(self._take(len(self._held)))] if self._held else []
            return False
        text = self._held.lstrip()
        for mark in self._form.special:
            if text.startswith(mark):
                text = text.removeprefix(mark).lstrip()
            elif text and mark.startswith(text):
                return False
        if not text:
            return False
        if text.startswith("{"):
            self._begun, self._held = self._held[: len(self._held) - len(text)], text
            self._at = _At.HEAD
            return True
        parts.append(Content(self._take(len(self._held))))
        self._num_calls = -1  # what follows is text, whatever it begins with
        return False

    def _head(self, parts: list[Part]) -> bool:
        opening = self._form.opening.strip()
        held = self._held.lstrip()
        if opening and not self._num_calls:
            if not held.startswith(opening):
                return self._no_call(parts) if held else False
            held = held.removeprefix(opening)
        found = self._named(held) if self._form.named else _HEAD.match(held)
        if found is None:
            return False if self._may_be_head(held) else self._no_call(parts)
        parts.append(CallStart(self._num_calls, found[1] if self._form.named else json.loads(found[1])))
        self._held, self._begun, self._at, self._depth = held[found.end() :], "", _At.ARGUMENTS, 0
        return True

    def _named(self, held: str) -> re.Match[str] | None:
        return re.match(rf"{_NAME}{re.escape(self._form.named)}\s*(?=\{{)", held)

    def _may_be_head(self, held: str) -> bool:
        """Tell whether a text may become a call's name, up to its arguments."""
        if not self._form.named:
            return not held.strip() or held.lstrip().startswith("{")
        begun = re.match(r"\s*[\w.-]*\s*", held)
        assert begun is not None
        rest, named = held[begun.end() :], self._form.named
        return named.startswith(rest) or (rest.startswith(named) and not rest.removeprefix(named).strip())

    def _no_call(self, parts: list[Part]) -> bool:
        parts.append(Content(self._begun + self._take(len(self._held))))
        self._begun, self._at = "", _At.TEXT
        return False

    def _arguments(self, parts: list[Part]) -> bool:
        end = self._end_of_arguments()
        text = self._take(len(self._held) if end is None else end)
        if text:
            parts.append(CallArguments(self._num_calls, text))
        if end is None:
            return False
        self._num_calls += 1
        self._at = _At.TAIL
        return True

    def _end_of_arguments(self) -> int | None:
        """Return where the object ends; None where it goes on."""
        for i, character in enumerate(self._held):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return i + 1
        return None

    def _tail(self) -> bool:
        """Skip what stands behind a call, up to the next one or to text."""
        text = self._held.lstrip()
        text = text if self._form.named else text.removeprefix("}")
        between, closing = self._form.between.split(), self._form.closing.strip()
        rest = text.lstrip()
        for mark in between:
            if not rest.startswith(mark):
                break
            rest = rest.removeprefix(mark).lstrip()
        else:
            if rest:
                self._held, self._at = rest, _At.HEAD
                return True
            return False
        rest = text.lstrip()
        if not closing or not rest.startswith(closing):
            return False  # it goes on, or the output was cut off
        if closing == between[0] and not rest.removeprefix(closing).strip():
            return False  # another call may follow
        left = rest.removeprefix(closing).lstrip()
        if len(between) > 1 and between[1].startswith(left):
            return False
        self._held, self._at = left, _At.TEXT
        return bool(left)

"""Tells what a model thinks, between ``<think>`` and ``</think>``, apart from what it says."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jpaged.server.messages.parts import Part, Reader, Reasoning
from jpaged.structured_outputs import StructuredOutputsParams, is_gbnf

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


class ThoughtTokens:
    """Counts the tokens of one output's thought, its marks included.

    Where the mark of its end is no token of its own, and stop strings hold text back, those tokens count too that came
    before the mark's text did.

    Args:
        reader: reads the output's text.
        end: the token that ends a thought; None where there is none.
        decode: makes text of tokens.
    """

    def __init__(self, reader: ThinkReader, end: int | None, decode: Callable[[Sequence[int]], str]) -> None:
        self._reader = reader
        self._end = end
        self._decode = decode
        self._num_read = 0
        self._num_tokens = 0
        self._ended = False

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """Take in more of the output, of which the reader has read the text already."""
        before, self._num_read = self._num_read, self._num_read + len(text)
        if self._ended:
            return
        length = self._reader.thought_length
        if self._end is not None and self._end in token_ids:
            self._num_tokens += token_ids.index(self._end) + 1
        elif length is None:
            self._num_tokens += len(token_ids)
            return
        else:
            self._num_tokens += self._within(token_ids, length - before)
        self._ended = True

    def _within(self, token_ids: Sequence[int], length: int) -> int:
        """Return how many of the tokens have the first so many characters of their text."""
        if len(token_ids) < 2:
            return len(token_ids)
        counts = range(1, len(token_ids))
        return 1 + bisect_left(counts, length, key=lambda count: len(self._decode(token_ids[:count])))

    @property
    def total(self) -> int:
        """Return the tokens so far; 0 where the output did not begin with a thought."""
        return 0 if self._reader.thought_length == 0 else self._num_tokens


Thought = Literal["none", "may", "runs"]
"""What may come before an answer: nothing, a thought, or the rest of one that the prompt began."""
ANY = "/(.|\\n)*/"
SPACE = "[\\s\\x1c-\\x1f]"
"""What Python's str.strip takes off; a regular expression of llguidance leaves out the last four."""


def before_shape(thought: Thought) -> tuple[str, list[str]]:
    """Return what a rule has in front of an answer that is forced, and the rules that this needs."""
    if thought == "none":
        return "", []
    before = "(thought GAP?)?" if thought == "may" else "thought GAP?"
    return before, [_thought(thought), "thought[lazy]: THOUGHT", f"GAP: /{SPACE}{{1,8}}/"]


def behind_thought(schema: Mapping[str, Any], thought: Thought) -> str:
    """Return the grammar of JSON that may come behind a thought."""
    before, rules = before_shape(thought)
    return "\n".join([f"start: {before} shape", *rules, f"shape: %json {json.dumps(schema)}"])


def before_text(thought: Thought) -> tuple[str, list[str]]:
    """Return the alternatives of `start` for an answer that is free, and the rules that they need.

    The alternatives name the rules `said`, an answer behind a thought or without one, and where a thought may come but
    need not `first`, an answer that does not begin with `THINKS`. A thought need not end.
    """
    if thought == "none":
        return "said", []
    rules = [_thought(thought), "thought[lazy]: THOUGHT", f"ENDED: {ANY} {json.dumps(END)} {ANY}"]
    if thought == "runs":
        return "thought said | THINKING", [*rules, f"THINKING: {ANY} & ~ENDED"]
    rules += [f"THINKS: /{SPACE}*{BEGIN}(.|\\n)*/", "THINKING: THINKS & ~ENDED"]
    return "thought said | THINKING | first", rules


def _thought(thought: Thought) -> str:
    begun = f"/{SPACE}*{BEGIN}/ " if thought == "may" else ""
    return f"THOUGHT: {begun}{ANY} {json.dumps(END)}"


_ENDS = re.compile(r"\\.|[/\n]", re.DOTALL)
"""What would end a regular expression in a Lark grammar, and what is escaped."""


def shape_rule(shape: StructuredOutputsParams) -> str:
    """Return what a rule of a Lark grammar has for a shape.

    Raises:
        ValueError: it is a grammar in GBNF, which no rule of another grammar can hold.
    """
    if shape.choice is not None:
        return " | ".join(json.dumps(text) for text in shape.choice)
    if shape.regex is not None:
        plain = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
        regex = _ENDS.sub(lambda match: plain.get(match[0], match[0]), shape.regex)
        return f"/{regex}/"
    if shape.grammar is not None:
        if is_gbnf(shape.grammar):
            raise ValueError("a grammar in GBNF cannot stand behind a thought: write it in Lark's syntax")
        return f"%lark {{\n{shape.grammar}\n}}"
    schema: dict[str, Any] = shape.json if shape.json is not None else {"type": "object"}
    if shape.disable_any_whitespace:
        schema = {**schema, "x-guidance": {**schema.get("x-guidance", {}), "whitespace_flexible": False}}
    return f"%json {json.dumps(schema)}"

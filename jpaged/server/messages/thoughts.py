"""Separates a model's thoughts from its answer: marks, reader, token count and grammar, one row of a table a family.

A row of `THOUGHT_FORMATS` is all that a new family needs; its name becomes a value of ``--reasoning-parser``.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jpaged.json_schema import followable
from jpaged.server.messages.parts import Part, Reader, Reasoning, held_back
from jpaged.structured_outputs import StructuredOutputsParams, is_gbnf

Thought = Literal["none", "may", "runs", "over"]
"""The thought before an answer.

"none": the server splits no thoughts off. "may": an optional one. "runs": the rest of one that the prompt began.
"over": the prompt ended one, as a template does where thinking is switched off, so none may begin.
"""
ANY = "/(.|\\n)*/"
SPACE = "[\\s\\x1c-\\x1f]"
"""The characters that Python's str.strip removes; llguidance's ``\\s`` lacks the last four."""
_ENDS = re.compile(r"\\.|[/\n]", re.DOTALL)
"""Escapes, and the characters that would end a regular expression in a Lark grammar."""


class ThoughtReader:
    """Reads an output that may begin with a thought.

    Args:
        answer: reads the text after the thought.
        marks: the family's marks.
        inside: whether the prompt ended with the opening mark, so that the output begins within a thought.

    Attributes:
        thought_length: characters of the output up to the end of its thought, marks included. 0: the output has no
            thought. None: not known yet, or the thought has not ended.
    """

    def __init__(self, answer: Reader, marks: ThoughtFormat, *, inside: bool) -> None:
        self._answer = answer
        self._marks = marks
        self._held = ""
        self._inside: bool | None = inside or None
        self._ended = False
        self._trim = False
        self._starts = True
        self._num_read = 0
        self.thought_length: int | None = None

    def push(self, text: str) -> list[Part]:
        if self._ended:
            return self._answer.push(self._trimmed(text))
        begin, end = self._marks.begin, self._marks.end
        self._held += text
        self._num_read += len(text)
        if self._inside is None:  # the output may still begin with a thought
            begun = self._held.lstrip()
            if begun.startswith(begin):
                self._inside, self._held = True, begun.removeprefix(begin)
            elif begin.startswith(begun):
                return []
            else:
                self._ended, self.thought_length = True, 0
                return self._answer.push(self._take(len(self._held)))
        if self._starts and self._held:
            self._held, self._starts = self._held.removeprefix("\n"), False
        at = self._held.find(end)
        if at < 0:
            thought = self._take(len(self._held) - held_back(self._held, end))
            return [Reasoning(thought)] if thought else []
        thought = self._take(at)
        self._ended = self._trim = True
        self.thought_length = self._num_read - len(self._held) + len(end)
        parts: list[Part] = [Reasoning(thought)] if thought else []
        return parts + self._answer.push(self._trimmed(self._take(len(self._held))[len(end) :]))

    def finish(self) -> list[Part]:
        rest = self._take(len(self._held))
        if self._inside and not self._ended:
            return [Reasoning(rest)] if rest else []
        if self.thought_length is None:
            self.thought_length = 0
        return [*self._answer.push(rest), *self._answer.finish()]

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _trimmed(self, text: str) -> str:
        """Drop the white space between a thought and the answer."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


class ThoughtTokens:
    """Counts the tokens of one output's thought, its marks included.

    If the closing mark is not one token and stop strings hold text back, tokens are counted that came before the mark's
    text was released.

    Args:
        reader: reads the output's text.
        end: the token that ends a thought; None if there is none.
        decode: decodes tokens to text.
    """

    def __init__(self, reader: ThoughtReader, end: int | None, decode: Callable[[Sequence[int]], str]) -> None:
        self._reader = reader
        self._end = end
        self._decode = decode
        self._num_read = 0
        self._num_tokens = 0
        self._ended = False

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """Count more of the output. The reader has to have read `text` before."""
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
        """Return how many of the tokens make up the first `length` characters of their text."""
        if len(token_ids) < 2:
            return len(token_ids)
        counts = range(1, len(token_ids))
        return 1 + bisect_left(counts, length, key=lambda count: len(self._decode(token_ids[:count])))

    @property
    def total(self) -> int:
        """Return the tokens so far; 0 if the output did not begin with a thought."""
        return 0 if self._reader.thought_length == 0 else self._num_tokens


@dataclass(frozen=True)
class ThoughtFormat:
    """The way a model family marks its thoughts: one row of `THOUGHT_FORMATS`.

    Attributes:
        begin, end: the marks around a thought.
        parser: class that reads the family's outputs.
    """

    begin: str
    end: str
    parser: type[ThoughtReader] = ThoughtReader

    def reader(self, answer: Reader, *, inside: bool) -> ThoughtReader:
        """Return a reader of one output; see `ThoughtReader`."""
        return self.parser(answer, self, inside=inside)

    def after(self, prompt: str, continued: str = "") -> Thought:
        """Return the thought that an answer to a prompt may have.

        Args:
            prompt: the rendered conversation.
            continued: the beginning of the answer, if the conversation's last message is continued.
        """
        prompt, continued = prompt.rstrip(), continued.strip()
        begun = continued.startswith(self.begin)
        if prompt.endswith(self.end) or (begun and self.end in continued):
            return "over"
        return "runs" if begun or prompt.endswith(self.begin) else "may"

    # ------------------------------------------------------------------ grammars, in Lark as llguidance reads it

    def before_forced(self, thought: Thought) -> tuple[str, list[str]]:
        """Return the beginning of the rule of an answer with a forced shape, and the rules that it refers to."""
        if thought in ("none", "over"):
            return "", []
        before = "(thought GAP?)?" if thought == "may" else "thought GAP?"
        return before, [self._terminal(thought), "thought[lazy]: THOUGHT", f"GAP: /{SPACE}{{1,8}}/"]

    def before_json(self, schema: Mapping[str, Any], thought: Thought) -> str:
        """Return the grammar of JSON that follows a thought."""
        return self.before_rule(f"%json {json.dumps(followable(schema))}", thought)

    def before_rule(self, rule: str, thought: Thought) -> str:
        """Return the grammar of a shape that follows a thought; see `shape_rule`."""
        before, rules = self.before_forced(thought)
        return "\n".join([f"start: {before} shape", *rules, f"shape: {rule}"])

    def before_text(self, thought: Thought) -> tuple[str, list[str]]:
        """Return the alternatives of `start` for an answer without a forced shape, and the rules that they refer to.

        The alternatives refer to the rule `said`, an answer with or without a thought before it, and for an optional
        thought to `first`, an answer that does not begin with `THINKS`. After a thought that is over, `first` is the
        only one. A thought need not end.
        """
        if thought == "none":
            return "said", []
        ended = f"ENDED: {ANY} {json.dumps(self.end)} {ANY}"
        thinks = f"THINKS: /{SPACE}*{_escaped(self.begin)}(.|\\n)*/"
        if thought == "over":
            return "first", [thinks]
        rules = [self._terminal(thought), "thought[lazy]: THOUGHT", ended]
        if thought == "runs":
            return "thought said | THINKING", [*rules, f"THINKING: {ANY} & ~ENDED"]
        rules += [thinks, "THINKING: THINKS & ~ENDED"]
        return "thought said | THINKING | first", rules

    def _terminal(self, thought: Thought) -> str:
        begun = f"/{SPACE}*{_escaped(self.begin)}/ " if thought == "may" else ""
        return f"THOUGHT: {begun}{ANY} {json.dumps(self.end)}"


def _escaped(mark: str) -> str:
    """Return a regular expression in Lark's syntax that matches a mark."""
    return re.escape(mark).replace("/", r"\/")


def shape_rule(shape: StructuredOutputsParams) -> str:
    """Return a shape as the right-hand side of a rule in a Lark grammar, next to a thought or to tool calls.

    Raises:
        ValueError: the shape is a grammar in GBNF, which cannot be embedded in a Lark grammar.
    """
    if shape.choice is not None:
        return " | ".join(json.dumps(text) for text in shape.choice)
    if shape.regex is not None:
        plain = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
        regex = _ENDS.sub(lambda match: plain.get(match[0], match[0]), shape.regex)
        return f"/{regex}/"
    if shape.grammar is not None:
        if is_gbnf(shape.grammar):
            raise ValueError(
                "a grammar in GBNF cannot follow a thought or stand next to tools: write it in Lark's syntax"
            )
        return f"%lark {{\n{shape.grammar}\n}}"
    return f"%json {json.dumps(followable(json_of(shape) or {}))}"


def json_of(shape: StructuredOutputsParams) -> dict[str, Any] | None:
    """Return the schema of a shape; None if it is not JSON."""
    if shape.kind not in ("json", "json_object"):
        return None
    schema: dict[str, Any] = {"type": "object"} if shape.json is None else dict(shape.json)
    if shape.disable_any_whitespace:
        schema["x-guidance"] = {**schema.get("x-guidance", {}), "whitespace_flexible": False}
    return schema


THINK = ThoughtFormat("<think>", "</think>")
THOUGHT_FORMATS = {"think": THINK}
"""Formats by the values of ``--reasoning-parser``: `think` is that of DeepSeek-R1 and Qwen3."""

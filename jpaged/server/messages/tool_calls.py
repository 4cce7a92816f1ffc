"""Tool calls of model families: marks, reader and grammar, one row of a table a family.

A row of `TOOL_FORMATS` is all that a family needs whose arguments are JSON; others need a subclass of `ToolFormat`
too. The row's name becomes a value of ``--tool-parser``. The grammar makes a model write calls that fit the functions'
schemas, and the reader finds them in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from jpaged.json_schema import LENIENT, first_unfollowed, followable, followed_as_far_as_can_be, names_apart
from jpaged.server.messages.parts import (
    CallArguments,
    CallCut,
    CallStart,
    Content,
    Part,
    PlainReader,
    Reader,
    held_back,
)
from jpaged.server.messages.thoughts import ANY, SPACE, THINK, Thought, ThoughtFormat, json_of, shape_rule
from jpaged.structured_outputs import StructuredOutputsParams

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_HEADS = ('{"name":"f","arguments":{', '{"name":"f","parameters":{')
"""Heads whose ends complete the beginning of any head."""
_NAME = r"\s*([\w.-]+)\s*"
"""A call's name that is not within a JSON object."""
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python's json.dumps writes it, which is how the families were trained."""
Special = Callable[[str], int | None]
"""Returns the id of a special token; None if the text is not one."""


class _At(Enum):
    """A reader's place in an output."""

    TEXT = "before a call"
    HEAD = "between a call's beginning and its arguments"
    ARGUMENTS = "in a call's arguments"
    TAIL = "after a call"


class ToolReader:
    """Reads one output. Text that begins like a call but is not one is content.

    What an output that ends within a call has of the call's name is left out, and the last part is `CallCut`.

    Args:
        form: the row of the model's family.
        shaped: whether an output without calls has a shape; of a family without a mark, an output that ends before it
            is known to be a call is then content.
    """

    def __init__(self, form: ToolFormat, *, shaped: bool = False) -> None:
        self._form = form
        self._shaped = shaped
        self._at = _At.TEXT
        self._held = ""
        self._begun = ""  # becomes content if no call follows
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
        is_cut = self._at is _At.ARGUMENTS or (self._at is _At.HEAD and self._is_call())
        rest, self._held = self._begun + self._held, ""
        if is_cut:
            return [CallCut()]
        return [Content(rest)] if self._at in (_At.TEXT, _At.HEAD) and rest.strip() else []

    def _is_call(self) -> bool:
        """Tell whether an output that ends in a head ends within a call, and not in other JSON."""
        if self._form.begin or self._num_calls:
            return True
        if self._shaped and not self._begun.strip():
            return False
        return any(_HEAD.match(self._held + head[i:]) for head in _HEADS for i in range(len(head)))

    def _step(self, parts: list[Part]) -> bool:
        """Take the next settled part; tell whether there may be another."""
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
        """Decide by its beginning whether the output is calls."""
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
        self._num_calls = -1  # the rest is text, whatever it begins with
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
        """Tell whether more text could complete a call's head, up to its arguments."""
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
        """Return the index after the object; None if it goes on."""
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
        """Skip the marks after a call, up to the next call or to text."""
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
            return False  # incomplete, or the output was cut off
        if closing == between[0] and not rest.removeprefix(closing).strip():
            return False  # another call may follow
        left = rest.removeprefix(closing).lstrip()
        if len(between) > 1 and between[1].startswith(left):
            return False
        self._held, self._at = left, _At.TEXT
        return bool(left)


class CallsOrShapeReader:
    """Reads one output that is calls or a text of some shape, as its beginning decides.

    A shaped text may quote the marks of a call, for instance in a string of its JSON, so it is not searched for calls.

    Args:
        begin: the mark before the first call.
        calls: reads an output that begins with the mark.
    """

    def __init__(self, begin: str, calls: Reader) -> None:
        self._begin = begin
        self._calls = calls
        self._reader: Reader | None = None
        self._held = ""

    def push(self, text: str) -> list[Part]:
        if self._reader is not None:
            return self._reader.push(text)
        self._held += text
        begun = self._held.lstrip()
        if begun.startswith(self._begin):
            self._reader = self._calls
        elif self._begin.startswith(begun):
            return []
        else:
            self._reader = PlainReader()
        return self._reader.push(self._held)

    def finish(self) -> list[Part]:
        if self._reader is None:
            return [Content(self._held)] if self._held else []
        return self._reader.finish()


@dataclass(frozen=True)
class ToolFormat:
    """The way a model family writes tool calls: one row of `TOOL_FORMATS`.

    Attributes:
        begin: the mark before the first call; "": an output that begins with a call is nothing but calls.
        opening, between, closing: the marks after `begin`, between two calls and after the last.
        arguments: name of the arguments' field.
        named: the mark between a call's name and its arguments; "": a call is a JSON object of both.
        special: marks that are special tokens in the family's tokenizers, which the text must show.
        variant_of: the family whose calls these are if `named` is a special token of the tokenizer; "": the row's own.
        parser: makes the reader of an output, from the format and `shaped`; see `ToolReader`.
    """

    begin: str
    opening: str
    between: str
    closing: str
    arguments: str = "arguments"
    named: str = ""
    special: tuple[str, ...] = ()
    variant_of: str = ""
    parser: Callable[..., Reader] = ToolReader

    def reader(self, *, shaped: bool = False) -> Reader:
        """Return a reader of one output.

        Args:
            shaped: whether an output without calls has a shape; see `CallsOrShapeReader`.
        """
        reader = self.parser(self, shaped=shaped)
        return CallsOrShapeReader(self.begin, reader) if shaped and self.begin else reader

    def grammar(
        self,
        functions: Sequence[Mapping[str, Any]],
        special: Special,
        *,
        forced: bool,
        parallel: bool,
        thought: Thought,
        marks: ThoughtFormat = THINK,
        shape: StructuredOutputsParams | None = None,
    ) -> str:
        """Return the Lark grammar of an answer.

        Args:
            functions: the functions that may be called, each with `name`, `parameters` and `strict`.
            special: see `Special`.
            forced: whether the answer must be a call. Otherwise it may be text, or begin with text.
            parallel: whether the answer may have several calls.
            thought: the thought that may precede the answer.
            marks: the marks of that thought.
            shape: the shape of an answer that is no call; None: it is free text.

        Raises:
            ValueError: the shape cannot stand next to calls, or the parameters of a function have another type than an
                object.
        """
        calls = f"opening call {'(between call)*' if parallel else ''} closing"
        if shape is None or forced:
            rules = (self._forced if forced else self._free)(special, thought, marks)
        else:
            before = marks.before_forced(thought)
            if not self.begin:
                return self._one_schema(functions, special, self._json(shape), before)
            rules = self._shaped(special, shape, before)
        rules.append(f"calls: {calls}")
        for name in ("opening", "between", "closing"):
            again = name == "between" and self.between == self.begin  # which may be a special token
            rules.append(f"{name}: {self._mark(special) if again else _loose(getattr(self, name))}")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            rules += self.call_rules(i, function, special)
        return "\n".join(rules)

    def call_rules(self, number: int, function: Mapping[str, Any], special: Special) -> list[str]:
        """Return the rules of a call of a function, the first of them ``call_<number>``.

        A format whose arguments are no JSON overrides it, and has a `parser` that makes JSON of them.
        """
        lenient = {} if function.get("strict") else LENIENT
        schema = _arguments(function)
        schema["x-guidance"] = {**_JSON_STYLE, **lenient, **names_apart(schema)}
        call = self._call(function["name"], f"args_{number}", special)
        return [f"call_{number}: {call}", f"args_{number}: %json {json.dumps(schema)}"]

    def _forced(self, special: Special, thought: Thought, marks: ThoughtFormat) -> list[str]:
        """Return the rules of an answer that must be calls."""
        before, rules = marks.before_forced(thought)
        return [f"start: {before} {self._mark(special)} calls", *rules]

    def _shaped(self, special: Special, shape: StructuredOutputsParams, thought: tuple[str, list[str]]) -> list[str]:
        """Return the rules of an answer that is calls or a shape."""
        before, rules = thought
        answer = f"answer: {self._mark(special)} calls | shape"
        return [f"start: {before} answer", answer, *rules, f"shape: {shape_rule(shape)}"]

    @staticmethod
    def _json(shape: StructuredOutputsParams) -> dict[str, Any]:
        schema = json_of(shape)
        if schema is None:
            message = "next to tools must be JSON for this model, whose calls have no mark before them"
            raise ValueError(f"{shape.kind} {message}")
        return schema

    def _one_schema(
        self,
        functions: Sequence[Mapping[str, Any]],
        special: Special,
        schema: Mapping[str, Any],
        thought: tuple[str, list[str]],
    ) -> str:
        """Return the grammar of an answer that is one call or JSON of a schema, for a family whose calls are JSON
        without a mark.

        It is one schema, since llguidance's lexer cannot tell the beginning of a call's text from that of other JSON.
        Each part has an ``$id``, against which its own ``$ref`` are resolved.
        """
        arguments = [_arguments(function) for function in functions]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    self.arguments: {"$id": f"urn:jpaged:call-{i}", **arguments[i]},
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for i, function in enumerate(functions)
        ]
        before, rules = thought
        shape = followable(schema)
        either = {
            "anyOf": [*calls, {"$id": "urn:jpaged:shape", **shape}],
            "x-guidance": names_apart(*arguments, shape),
        }
        start = f"start: {before} {self._mark(special)} answer"
        return "\n".join([start, *rules, f"answer: %json {json.dumps(either)}"])

    def _free(self, special: Special, thought: Thought, marks: ThoughtFormat) -> list[str]:
        """Return the rules of an answer that may be text or begin with text.

        Text contains no beginning of a call, and text without a thought does not begin like one, so that each call that
        `ToolReader` and `ThoughtReader` find after the thought is one of the grammar's.
        """
        start, rules = marks.before_text(thought)
        rules = [f"start: {start}", *rules, f"CALLED: {self._called}", f"SPACES: /{SPACE}+/"]
        if thought != "over":
            rules += self._said("said", special)
        return [*rules, *self._said("first", special, " & ~THINKS")] if thought in ("may", "over") else rules

    @property
    def _called(self) -> str:
        """Return the terminal that matches outputs in which a reader finds the beginning of a call."""
        if self.begin:
            return f"{ANY} {json.dumps(self.begin)} {ANY}"
        marks = [f"({json.dumps(mark)} /{SPACE}*/)?" for mark in self.special]
        return " ".join([f"/{SPACE}*/", *marks, f'"{{" {ANY}'])

    def _said(self, name: str, special: Special, limit: str = "") -> list[str]:
        """Return the rules of text, of calls, and of text before calls.

        Args:
            name: name of the first rule.
            limit: restricts a terminal at the beginning of the output.
        """
        text = f"{name.upper()}_TEXT"
        rules = [f"{text}: {ANY} & ~CALLED{limit}"]
        if not self.begin:
            marks = " ".join(f"(<[{token}]> SPACES?)?" for token in self._ids(special))
            return [*rules, f"{name}: {text} | SPACES? {marks} calls"]
        if special(self.begin) is not None:
            return [*rules, f"{name}: {text} | {text} {self._mark(special)} calls"]
        head = f"{name.upper()}_HEAD"
        rules += [f"{head}_ANY: {ANY} {json.dumps(self.begin)}", f"{head}: {head}_ANY{limit}"]
        return [*rules, f"{name}: {text} | {name}_head calls", f"{name}_head[lazy]: {head}"]

    def _call(self, name: str, arguments: str, special: Special) -> str:
        """Return the rule of a call; `arguments` is the rule of its arguments."""
        if self.named:
            token = special(self.named)
            mark = json.dumps(self.named) if token is None else f"<[{token}]>"
            return f"{json.dumps(name)} {mark} {arguments}"
        head = f'{{"name": {json.dumps(name)}, {json.dumps(self.arguments)}: '
        return f'{json.dumps(head)} {arguments} "}}"'

    def _mark(self, special: Special) -> str:
        """Return the rule of the mark before the first call."""
        if not self.begin:
            return " ".join(f"(<[{token}]>)?" for token in self._ids(special))
        token = special(self.begin)
        return json.dumps(self.begin) if token is None else f"<[{token}]>"

    def _ids(self, special: Special) -> list[int]:
        return [token for text in self.special if (token := special(text)) is not None]


_OF_NO_ARGUMENTS = {"type", "properties", "required", "title", "description", "$schema"}
"""Keywords of the schemas that clients send for functions without arguments."""


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which is an object even if its parameters do not say so.

    A function without parameters has no arguments, nor one with ``{"type": "object", "properties": {}}``, which clients
    send for such. Keywords that cannot be followed are left to the model, unless the
    function is strict.

    Raises:
        ValueError: the parameters have another type, or a keyword of a strict function cannot be followed.
    """
    parameters = function.get("parameters")
    schema = {"type": "object", **({"properties": {}} if parameters is None else parameters)}
    if schema.get("properties") == {} and not schema.get("required") and schema.keys() <= _OF_NO_ARGUMENTS:
        schema["additionalProperties"] = False
    if schema["type"] not in ("object", ["object"]):
        raise ValueError(
            f"the parameters of {function['name']!r} have the type {schema['type']!r}: arguments are an object"
        )
    if not function.get("strict"):
        return followed_as_far_as_can_be(schema)
    if (keyword := first_unfollowed(schema)) is not None:
        raise ValueError(
            f"the parameters of {function['name']!r} have {keyword}, which cannot be followed: strict=false leaves it "
            "to the model"
        )
    return followable(schema)


def _loose(text: str) -> str:
    """Return a text as a rule in which every line break is optional."""
    rule = []
    for i, piece in enumerate(text.split("\n")):
        rule += ['"\\n"?'] if i else []
        rule += [json.dumps(piece)] if piece else []
    return " ".join(rule)


TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "llama3": ToolFormat("", "", "; ", "", arguments="parameters", special=("<|python_tag|>",)),
    "mistral": ToolFormat("[TOOL_CALLS]", "[", ", ", "]", special=("[TOOL_CALLS]",)),
    "mistral_args": ToolFormat(
        "[TOOL_CALLS]",
        "",
        "[TOOL_CALLS]",
        "",
        named="[ARGS]",
        special=("[TOOL_CALLS]", "[ARGS]"),
        variant_of="mistral",
    ),
}
"""Formats of Hermes and Qwen; Llama 3.1 to 3.3; Mistral up to tokenizer v7; and Mistral since v11."""


def tool_families() -> tuple[str, ...]:
    """Return the values of ``--tool-parser``."""
    return tuple(name for name, form in TOOL_FORMATS.items() if not form.variant_of)


def format_of(family: str, special: Special) -> ToolFormat:
    """Return the format of a family, or of its variant if the tokenizer has the variant's token."""
    for form in TOOL_FORMATS.values():
        if form.variant_of == family and special(form.named) is not None:
            return form
    return TOOL_FORMATS[family]

"""How model families write tool calls: as a grammar that an answer follows, and as marks that a reader looks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpaged.server.message.thought_grammar import ANY, SPACE, Thought, before_shape, before_text

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python's json.dumps writes it, which is how families were trained."""
Special = Callable[[str], int | None]
"""Returns the id of a special token; None where the text is none."""


@dataclass(frozen=True)
class ToolFormat:
    """The form of one family.

    Attributes:
        begin: stands before the first call; "" = calls are all there is, where they are the first thing.
        opening, between, closing: what stands behind `begin`, between two calls and behind the last.
        arguments: name of the arguments' field.
        named: what stands between a call's name and its arguments, where a call is no JSON object of both; "" = it is.
        special: marks that are special tokens in the family's tokenizers, which the text must show.
    """

    begin: str
    opening: str
    between: str
    closing: str
    arguments: str = "arguments"
    named: str = ""
    special: tuple[str, ...] = ()

    def grammar(
        self,
        functions: Sequence[Mapping[str, Any]],
        special: Special,
        *,
        forced: bool,
        parallel: bool,
        thought: Thought,
    ) -> str:
        """Return the Lark grammar of an answer.

        Args:
            functions: those that may be called, each with `name` and `parameters`.
            special: see `Special`.
            forced: whether the answer is a call; else it may be text, or begin with text.
            parallel: whether there may be several calls.
            thought: what may come before the answer.

        Raises:
            ValueError: the parameters of a function are those of another type than an object.
        """
        calls = f"opening call {'(between call)*' if parallel else ''} closing"
        rules = [*(self._forced(special, thought) if forced else self._free(special, thought)), f"calls: {calls}"]
        for name in ("opening", "between", "closing"):
            again = name == "between" and self.between == self.begin  # which may be a special token
            rules.append(f"{name}: {self._mark(special) if again else _loose(getattr(self, name))}")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            schema = {**_arguments(function), "x-guidance": _JSON_STYLE}
            rules += [f"call_{i}: {self._call(function['name'], f'args_{i}', special)}"]
            rules += [f"args_{i}: %json {json.dumps(schema)}"]
        return "\n".join(rules)

    def _forced(self, special: Special, thought: Thought) -> list[str]:
        """Return the rules of an answer that is calls."""
        before, rules = before_shape(thought)
        return [f"start: {before} {self._mark(special)} calls", *rules]

    def _free(self, special: Special, thought: Thought) -> list[str]:
        """Return the rules of an answer that may be text or begin with text.

        Text has no beginning of a call, and text without a thought does not begin as one: what `ToolReader` and
        `ThinkReader` take for a call behind the thought is one of the grammar's.
        """
        start, rules = before_text(thought)
        rules = [f"start: {start}", *rules, f"CALLED: {self._called}", f"SPACES: /{SPACE}+/"]
        rules += self._said("said", special)
        return [*rules, *self._said("first", special, " & ~THINKS")] if thought == "may" else rules

    @property
    def _called(self) -> str:
        """Return the terminal of outputs in which a reader finds the beginning of a call."""
        if self.begin:
            return f"{ANY} {json.dumps(self.begin)} {ANY}"
        marks = [f"({json.dumps(mark)} /{SPACE}*/)?" for mark in self.special]
        return " ".join([f"/{SPACE}*/", *marks, f'"{{" {ANY}'])

    def _said(self, name: str, special: Special, limit: str = "") -> list[str]:
        """Return the rules of text, of calls, and of text before calls.

        Args:
            name: of the first rule.
            limit: follows a terminal that is the beginning of the output.
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
        """Return the rule of what stands before the first call."""
        if not self.begin:
            return " ".join(f"(<[{token}]>)?" for token in self._ids(special))
        token = special(self.begin)
        return json.dumps(self.begin) if token is None else f"<[{token}]>"

    def _ids(self, special: Special) -> list[int]:
        return [token for text in self.special if (token := special(text)) is not None]


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object also where its parameters do not say so."""
    parameters = function.get("parameters") or {"properties": {}}
    schema = {"type": "object", **parameters}
    if schema["type"] not in ("object", ["object"]):
        raise ValueError(
            f"the parameters of {function['name']!r} have the type {schema['type']!r}: arguments are an object"
        )
    return schema


def _loose(text: str) -> str:
    """Return a text as a rule in which every line break may be left out."""
    rule = []
    for i, piece in enumerate(text.split("\n")):
        rule += ['"\\n"?'] if i else []
        rule += [json.dumps(piece)] if piece else []
    return " ".join(rule)


FORMATS = {
    "hermes": ToolFormat("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "llama3": ToolFormat("", "", "; ", "", arguments="parameters", special=("<|python_tag|>",)),
    "mistral": ToolFormat("[TOOL_CALLS]", "[", ", ", "]", special=("[TOOL_CALLS]",)),
    "mistral_args": ToolFormat(
        "[TOOL_CALLS]", "", "[TOOL_CALLS]", "", named="[ARGS]", special=("[TOOL_CALLS]", "[ARGS]")
    ),
}
"""Forms of the families Hermes and Qwen; Llama 3.1 to 3.3; Mistral up to tokenizer v7, and Mistral since v11."""


def format_of(family: str, special: Special) -> ToolFormat:
    """Return the form of a family that --tool-parser names; Mistral's depends on whether `[ARGS]` is a token."""
    return FORMATS["mistral_args" if family == "mistral" and special("[ARGS]") is not None else family]

"""How model families write tool calls: as a grammar that an answer follows, and as marks that a reader looks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python's json.dumps writes it, which is how families were trained."""
Thought = Literal["none", "may", "runs"]
"""What may come before a forced call: nothing, a thought, or the rest of one that the prompt began."""
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
            thought: what may come before a forced call.
        """
        calls = f"opening call {'(between call)*' if parallel else ''} closing"
        rules = ["TEXT: /(.|\\n)*/"]
        mark = self._mark(special)
        if forced:
            before, rule = _thought(thought)
            rules += [f"start: {before} {mark} {calls}", *rule]
        elif not self.begin:
            rules += [f"start: said? | {mark} {calls}", "said: /[^{](.|\\n)*/"]
        elif special(self.begin) is not None:
            rules += [f"start: TEXT | TEXT {mark} {calls}"]
        else:
            rules += [f"start: TEXT | pre {calls}", f"pre[lazy]: TEXT {json.dumps(self.begin)}"]
        for name in ("opening", "between", "closing"):
            again = name == "between" and self.between == self.begin  # which may be a special token
            rules.append(f"{name}: {mark if again else _loose(getattr(self, name))}")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            schema = {**(function.get("parameters") or {"type": "object", "properties": {}}), "x-guidance": _JSON_STYLE}
            rules += [f"call_{i}: {self._call(function['name'], f'args_{i}', special)}"]
            rules += [f"args_{i}: %json {json.dumps(schema)}"]
        return "\n".join(rules)

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
            ids = [token for text in self.special if (token := special(text)) is not None]
            return " ".join(f"(<[{token}]>)?" for token in ids)
        token = special(self.begin)
        return json.dumps(self.begin) if token is None else f"<[{token}]>"


def behind_thought(schema: Mapping[str, Any], thought: Thought) -> str:
    """Return the Lark grammar of JSON that may come behind a thought."""
    before, rule = _thought(thought)
    return "\n".join([f"start: {before} shape", *rule, f"shape: %json {json.dumps(schema)}"])


def _thought(thought: Thought) -> tuple[str, list[str]]:
    """Return what stands for a thought in a rule, and the rule of the thought itself."""
    if thought == "none":
        return "", []
    begun = "<think>" if thought == "may" else ""
    return "thought?" if thought == "may" else "thought", [f"thought[lazy]: /{begun}(.|\\n)*<\\/think>\\s*/"]


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

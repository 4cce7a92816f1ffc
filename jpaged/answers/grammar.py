"""Makes the grammar of an answer, in Lark as llguidance reads it, from the row of a family's format.

Text contains no beginning of a call, and text without a thought does not begin like one, so that each call that a
reader finds is one of the grammar's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jpaged.answers.format import AnswerFormat, Calls, Region, pieces_of
from jpaged.answers.marks import Marks
from jpaged.answers.notations import Json, Literals
from jpaged.answers.value_rules import ANY, JSON_STYLE, in_lark, literal_rules, tagged_rules
from jpaged.json_schema import (
    LENIENT,
    first_unfollowed,
    followable,
    followed_as_far_as_can_be,
    names_apart,
    with_definitions,
)
from jpaged.structured_outputs import StructuredOutputsParams, is_gbnf

Thought = Literal["none", "may", "runs", "over"]
"""The thought before an answer.

"none": no thoughts are split off. "may": an optional one. "runs": the rest of one that the prompt began. "over": the
prompt ended one, as a template does where thinking is switched off, so none may begin.
"""
SPACE = "[\\s\\x1c-\\x1f]"
"""The characters that Python's str.strip removes. ``\\s``, of llguidance and of readers' patterns, lacks the last four;
rules of white space alone use that, as no answer has these four there."""
_ID = "/[A-Za-z0-9_-]{1,12}/"
"""Ids that a model is led to write: Mistral's have nine characters."""
_NUMBER = "/[0-9]{1,3}/"


@dataclass(frozen=True)
class AnswerGrammar:
    """The grammars of one format in one tokenizer."""

    form: AnswerFormat
    marks: Marks

    # ------------------------------------------------------------------ answers with calls

    def answer(
        self,
        functions: Sequence[Mapping[str, Any]],
        *,
        forced: bool,
        parallel: bool,
        thought: Thought,
        shape: StructuredOutputsParams | None = None,
    ) -> str:
        """Return the grammar of an answer that may have calls.

        Args:
            functions: the functions that may be called, each with `name`, `parameters` and `strict`.
            forced: whether the answer must be a call. Otherwise it may be text, or begin with text.
            parallel: whether the answer may have several calls.
            thought: the thought that may precede the answer.
            shape: the shape of an answer that is no call; None: it is free text.

        Raises:
            ValueError: the shape cannot stand next to calls, or the parameters of a function have another type than an
                object.
        """
        if forced or shape is None:
            rules = self._forced(thought) if forced else self._free(thought)
        else:
            if not self._calls[0].begin:
                return self._one_schema(functions, shape, thought)
            before, rules = self._before_forced(thought)
            rules = [f"start: {before} answer", f"answer: {self._marked_calls} | shape", *rules]
            rules.append(f"shape: {shape_rule(shape)}")
        for i, calls in enumerate(self._calls):
            rules += self._block(i, calls, functions, parallel)
        return "\n".join(rules)

    @property
    def _calls(self) -> list[Calls]:
        """Return the ways to write calls that a model is led to."""
        return [calls for calls in self.form.calls if not calls.is_read_only]

    def _block(self, number: int, calls: Calls, functions: Sequence[Mapping[str, Any]], parallel: bool) -> list[str]:
        """Return the rules of calls after their first mark."""
        own = self._suffix(number)
        more = f"(between{own} call{own})*" if parallel else ""
        closing = self.marks.rule(calls.closing)
        rules = [
            f"calls{own}: opening{own} call{own} {more} closing{own}",
            f"opening{own}: {self.marks.rule(calls.opening)}",
            f"between{own}: {self.marks.rule(calls.between)}",
            f"closing{own}: {f'({closing})?' if calls.closing.strip() in self.form.ends else closing}",
            f"call{own}: " + " | ".join(f"call{own}_{i}" for i in range(len(functions))),
        ]
        for i, function in enumerate(functions):
            rules += self._call_rules(f"{own}_{i}", calls, function)
        return rules

    def _suffix(self, number: int) -> str:
        """Return the end of the names of the rules of one way to write calls."""
        return f"_{'abcdefgh'[number]}" if len(self._calls) > 1 else ""

    def _call_rules(self, suffix: str, calls: Calls, function: Mapping[str, Any]) -> list[str]:
        schema = arguments_of(function)
        lenient = {} if function.get("strict") else LENIENT
        options = {**JSON_STYLE, **lenient, **names_apart(schema)}
        name, arguments = function["name"], f"args{suffix}"
        made = []
        for text, may_be_absent in pieces_of(calls.call):
            rule = self._call_text(text, name, arguments)
            made.append(f"({rule})?" if may_be_absent else rule)
        call = f"call{suffix}: {' '.join(made)}"
        if isinstance(calls.notation, Json):
            return [call, f"{arguments}: %json {json.dumps({**schema, 'x-guidance': options})}"]
        rest = (arguments, with_definitions(schema), self.marks, options)
        try:
            if isinstance(calls.notation, Literals):
                return [call, *literal_rules(calls.notation, *rest)]
            return [call, *tagged_rules(calls.notation, *rest)]
        except ValueError as error:
            raise ValueError(f"the parameters of {name!r}: {error}") from error

    def _call_text(self, text: str, name: str, arguments: str) -> str:
        text = text.replace('"$name"', json.dumps(name)).replace("$name", name)
        made = []
        for part in re.split(r'("?\$id"?|\$arguments)', text):
            if part == "$arguments":
                made.append(arguments)
            elif "$id" in part:
                made += [r'"\""', _ID, r'"\""'] if part.startswith('"') else [_NUMBER]
            elif part:
                made.append(self.marks.rule(part))
        return " ".join(made)

    # ------------------------------------------------------------------ thoughts

    @property
    def _thought(self) -> Region | None:
        """Return the marks of thoughts; of marks of which some are tokens, these."""
        thought = self.form.thought
        if thought is None or not any(map(self._is_token, thought.begin)):
            return thought
        begin, end = (tuple(filter(self._is_token, marks)) for marks in (thought.begin, thought.end))
        return replace(thought, begin=begin, end=end or thought.end)

    @property
    def _thought_is_of_tokens(self) -> bool:
        """Tell whether thoughts begin and end with tokens, which no text spells."""
        thought = self._thought
        return thought is not None and all(self._is_token(mark) for mark in (*thought.begin, *thought.end))

    def _is_token(self, mark: str) -> bool:
        pieces = self.marks.pieces(mark.strip())
        return bool(pieces) and pieces[0] in self.marks.tokens

    def _either(self, marks: Sequence[str]) -> str:
        return f"({' | '.join(map(self.marks.rule, marks))})"

    def _before_forced(self, thought: Thought) -> tuple[str, list[str]]:
        """Return the beginning of the rule of an answer with a forced shape, and the rules that it refers to."""
        if thought in ("none", "over") or self.form.thought is None:
            return self._gap_of_skipped, self._gap_rules if self.form.skipped else []
        gap = "gap?" if self.form.skipped else "GAP?"
        before = f"(thought {gap})?" if thought == "may" else f"thought {gap}"
        if self.form.thought.anywhere:
            before += f" (more_thought {gap})*"
        return before, [*self._thought_rules(thought), *self._gap_rules]

    @property
    def _gap_of_skipped(self) -> str:
        return "gap?" if self.form.skipped else ""

    @property
    def _gap_rules(self) -> list[str]:
        skipped = " | ".join(["GAP", *map(self.marks.rule, self.form.skipped)])
        return [*([f"gap: ({skipped})+"] if self.form.skipped else []), r"GAP: /\s{1,8}/"]

    def _thought_rules(self, thought: Thought) -> list[str]:
        marks = self._thought
        assert marks is not None
        if self._thought_is_of_tokens:
            begin, end = self._either(marks.begin), self._either(marks.end)
            begun = f"SPACE_BEFORE? {begin} " if thought == "may" else ""
            rules = [f"thought: {begun}INNER? {end}", f"INNER: {ANY}", r"SPACE_BEFORE: /\s+/"]
            return [*rules, *([f"more_thought: {begin} INNER? {end}"] if marks.anywhere else [])]
        begun = rf"/\s*{self._any_regex(marks.begin)}/ " if thought == "may" else ""
        rules = [f"THOUGHT: {begun}{ANY} {self._any_text(marks.end)}", "thought[lazy]: THOUGHT"]
        if marks.anywhere:
            more = f"MORE_THOUGHT: /{self._any_regex(marks.begin)}/ {ANY} {self._any_text(marks.end)}"
            rules += [more, "more_thought[lazy]: MORE_THOUGHT"]
        return rules

    @staticmethod
    def _any_regex(marks: Sequence[str]) -> str:
        each = [re.escape(mark).replace("/", r"\/").replace("\n", "n") for mark in marks]
        return each[0] if len(each) == 1 else f"({'|'.join(each)})"

    @staticmethod
    def _any_text(marks: Sequence[str]) -> str:
        each = [json.dumps(mark) for mark in marks]
        return each[0] if len(each) == 1 else f"({' | '.join(each)})"

    def before_rule(self, rule: str, thought: Thought) -> str:
        """Return the grammar of a shape that follows a thought; see `shape_rule`."""
        before, rules = self._before_forced(thought)
        text = self.form.text
        marked = f"{self._either(text.begin)} shape" + (f" {self._either(text.end)}?" if text.end else "")
        shown = f"({marked} | shape)" if text.begin else "shape"  # without the mark before it the one after it is text
        return "\n".join([f"start: {before} {shown}", *rules, f"shape: {rule}"])

    def before_json(self, schema: Mapping[str, Any], thought: Thought) -> str:
        """Return the grammar of JSON that follows a thought."""
        return self.before_rule(f"%json {json.dumps(followable(schema))}", thought)

    # ------------------------------------------------------------------ answers that may be text

    def _forced(self, thought: Thought) -> list[str]:
        """Return the rules of an answer that must be calls."""
        before, rules = self._before_forced(thought)
        return [f"start: {before} {self._marked_calls}", *rules]

    @property
    def _marked_calls(self) -> str:
        """Return the rule of calls with the mark before them."""
        each = [f"{self._mark(calls)} calls{self._suffix(i)}" for i, calls in enumerate(self._calls)]
        return each[0] if len(each) == 1 else f"({' | '.join(each)})"

    def _mark(self, calls: Calls) -> str:
        if calls.begin:
            return self.marks.rule(calls.begin)
        return " ".join(f"({self.marks.rule(mark)})?" for mark in calls.before if self._is_token(mark))

    def _free(self, thought: Thought) -> list[str]:
        """Return the rules of an answer that may be text or begin with text.

        The alternatives refer to the rule `said`, an answer with or without a thought before it, and for an optional
        thought to `first`, an answer that does not begin like one. After a thought that is over, `first` is the only
        one. A thought need not end. The token that begins calls ends it too.
        """
        marks = self._thought
        if marks is None:
            thought = "none"
        gap = self._gap_of_skipped
        called = [f"CALLED: {self._called}", r"SPACES: /\s+/", *(self._gap_rules if gap else [])]
        if thought == "none" or (thought == "over" and self._thought_is_of_tokens):
            return [f"start: {gap} said" if gap else "start: said", *called, *self._said("said")]
        assert marks is not None
        in_thought = " | ".join(
            f"{self._mark(calls)} calls{self._suffix(i)}"
            for i, calls in enumerate(self._calls)
            if self._is_token(calls.begin)
        )
        calls_end_it = f" ({in_thought})?" if in_thought else ""
        rules = [] if thought == "over" else self._thought_rules(thought)
        if self._thought_is_of_tokens:
            more = f"{gap} (more_thought {gap})*" if marks.anywhere else gap
            begun = "" if thought == "runs" else f"SPACE_BEFORE? {self._either(marks.begin)} "
            start = f"start: thought {more} said | {begun}INNER?{calls_end_it}"
            start += "" if thought == "runs" else f" | {gap} said"
            return [start, *rules, *called, *self._said("said")]
        ended = f"ENDED: {ANY} {self._any_text(marks.end)} {ANY}"
        thinks = f"THINKS: /{SPACE}*{self._any_regex(marks.begin)}(.|\\n)*/"
        first = self._said("first", " & ~THINKS")
        if thought == "over":
            return ["start: first", thinks, *called, *first]
        rules.append(ended)
        if thought == "runs":
            start = f"start: thought said | THINKING{calls_end_it}"
            return [start, *rules, f"THINKING: {ANY} & ~ENDED", *called, *self._said("said")]
        rules += [thinks, "THINKING: THINKS & ~ENDED", *called]
        return [f"start: thought said | THINKING{calls_end_it} | first", *rules, *self._said("said"), *first]

    @property
    def _called(self) -> str:
        """Return the terminal that matches text in which a reader finds the beginning of a call.

        Text may spell a mark that is a token.
        """
        each = []
        for calls in self.form.calls:
            if self._is_token(calls.begin):
                continue
            if calls.begin:
                each.append(f"{ANY} {json.dumps(calls.begin)} {ANY}")
                continue
            marks = [f"({json.dumps(mark)} /{SPACE}*/)?" for mark in calls.before]
            first = (calls.opening + calls.call).lstrip()[0]
            each.append(" ".join([f"/{SPACE}*/", *marks, f"{json.dumps(first)} {ANY}"]))
        return " | ".join(dict.fromkeys(each)) or "/[^\\s\\S]/"

    def _said(self, name: str, limit: str = "") -> list[str]:
        """Return the rules of text, of calls, and of text before calls.

        Args:
            name: name of the first rule.
            limit: restricts a terminal at the beginning of the output.
        """
        text = f"{name.upper()}_TEXT"
        rules = [f"{text}: {ANY} & ~CALLED{limit}"]
        shown, regions = text, ""
        region = self.form.text
        if region.begin and all(self._is_token(mark) for mark in (*region.begin, *region.end)):
            shown = f"{name}_marked"
            end = f"({self._either(region.end)} {self._gap_of_skipped})?"
            marked = f"{self._either(region.begin)} {text}? {end}"
            rules.append(f"{name}_region: {marked}")
            rules.append(f"{shown}: {text} | {name}_region{'+' if region.anywhere else ''}")
            regions = f"{name}_region* "
        alternatives, heads = [shown], []
        by_mark: dict[str, list[int]] = {}
        for i, calls in enumerate(self._calls):
            by_mark.setdefault(calls.begin, []).append(i)
        for begin, numbers in by_mark.items():
            calls_of = " | ".join(f"calls{self._suffix(i)}" for i in numbers)
            block = calls_of if len(numbers) == 1 else f"({calls_of})"
            if not begin:
                before = dict.fromkeys(mark for i in numbers for mark in self._calls[i].before)
                tokens = " ".join(f"({self.marks.rule(mark)} SPACES?)?" for mark in before if self._is_token(mark))
                alternatives.append(f"SPACES? {tokens} {block}")
            elif self._is_token(begin):
                alternatives.append(f"{shown} {self.marks.rule(begin)} {block}")
            else:
                head = f"{name.upper()}_HEAD" + (f"_{len(alternatives)}" if len(by_mark) > 1 else "")
                rules += [f"{head}_ANY: {ANY} {json.dumps(begin)}", f"{head}: {head}_ANY{limit}"]
                heads.append(f"{head.lower()}[lazy]: {head}")
                alternatives.append(f"{regions}{head.lower()} {block}")
        return [*rules, f"{name}: {' | '.join(alternatives)}", *heads]

    # ------------------------------------------------------------------ a shape next to calls without a mark

    def _one_schema(
        self, functions: Sequence[Mapping[str, Any]], shape: StructuredOutputsParams, thought: Thought
    ) -> str:
        """Return the grammar of an answer that is one call or JSON of a schema, for a family whose calls are JSON
        without a mark.

        It is one schema, since llguidance's lexer cannot tell the beginning of a call's text from that of other JSON.
        Each part has an ``$id``, against which its own ``$ref`` are resolved.
        """
        schema = json_of(shape)
        form = next((calls for calls in self._calls if calls.is_json and not calls.opening), self._calls[0])
        if schema is None or not form.is_json or form.opening:
            message = "next to tools must be JSON for this model, whose calls have no mark before them"
            if schema is not None:
                message = "next to tools has no place with this model, whose calls have no mark before them"
            raise ValueError(f"{shape.kind} {message}")
        named = "parameters" if '"parameters"' in form.call else "arguments"
        arguments = [arguments_of(function) for function in functions]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    named: {"$id": f"urn:jpaged:call-{i}", **arguments[i]},
                },
                "required": ["name", named],
                "additionalProperties": False,
            }
            for i, function in enumerate(functions)
        ]
        before, rules = self._before_forced(thought)
        plain = followable(schema)
        either = {
            "anyOf": [*calls, {"$id": "urn:jpaged:shape", **plain}],
            "x-guidance": names_apart(*arguments, plain),
        }
        return "\n".join([f"start: {before} {self._mark(form)} answer", *rules, f"answer: %json {json.dumps(either)}"])


def shape_rule(shape: StructuredOutputsParams) -> str:
    """Return a shape as the right-hand side of a rule in a Lark grammar, next to a thought or to tool calls.

    Raises:
        ValueError: the shape is a grammar in GBNF, which cannot be embedded in a Lark grammar.
    """
    if shape.choice is not None:
        return " | ".join(json.dumps(text) for text in shape.choice)
    if shape.regex is not None:
        return f"/{in_lark(shape.regex)}/"
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


_OF_NO_ARGUMENTS = {"type", "properties", "required", "title", "description", "$schema"}
"""Keywords of the schemas that clients send for functions without arguments."""


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which is an object even if its parameters do not say so.

    A function without parameters has no arguments, nor one with ``{"type": "object", "properties": {}}``, which clients
    send for such. Keywords that cannot be followed are left to the model, unless the function is strict.

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

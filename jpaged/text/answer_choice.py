"""Finds the row of answer formats that a model writes, by what its chat template renders.

A call, a thought and a text are rendered; the row that reads them back is the model's.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

from jpaged.answers.bound import BoundFormat, variant_of
from jpaged.answers.format import AnswerFormat
from jpaged.answers.parts import CallArguments, CallStart, Content, Reasoning, TokenSpan
from jpaged.answers.response_template import RESPONSE_TEMPLATE, format_of_template
from jpaged.answers.rows import ANSWER_FORMATS

_NAME, _ID, _ARGUMENTS = "tried_name", "tried0001", {"tried_key": "tried value", "tried_count": 7}
_TEXT, _THOUGHT = "a tried text", "a tried thought"
_USER = {"role": "user", "content": "hello"}
_PROPERTIES = {"tried_key": {"type": "string"}, "tried_count": {"type": "integer"}}
_FUNCTION = {
    "name": _NAME,
    "description": "tried",
    "parameters": {"type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES)},
}


@dataclass(frozen=True)
class Choice:
    """The rows that a model's template was found to render.

    Attributes:
        tools, thoughts: names of rows; None: none.
        why_no_tools, why_no_thoughts: the reason where there is none.
    """

    tools: str | None = None
    thoughts: str | None = None
    why_no_tools: str = ""
    why_no_thoughts: str = ""


def chosen_formats(tokenizer: Any, template: str | None = None) -> Choice:
    """Return the rows that read back what a chat template renders, or `RESPONSE_TEMPLATE`, if the model has one.

    Args:
        template: the template; None = the tokenizer's own.
    """
    if template is not None:
        tokenizer = copy(tokenizer)
        tokenizer.chat_template = template
    if not getattr(tokenizer, "chat_template", None):
        return Choice(why_no_tools="there is no chat template", why_no_thoughts="there is no chat template")
    own = None if template is not None else _own_format(tokenizer)
    tools, why_no_tools = (RESPONSE_TEMPLATE, "") if own and own.calls else _tools(tokenizer)
    thoughts, why_no_thoughts = (RESPONSE_TEMPLATE, "") if own and own.thought else _thoughts(tokenizer, tools)
    return Choice(tools, thoughts, why_no_tools, why_no_thoughts)


def _own_format(tokenizer: Any) -> AnswerFormat | None:
    """Return the format of the model's own response template; None: there is none, or no format has what it has."""
    own = getattr(tokenizer, "response_template", None)
    if own is None:
        return None
    try:
        return format_of_template(own)
    except ValueError as error:
        logging.getLogger("jpaged.text").warning("%s: the chat template tells instead how answers are read", error)
        return None


def _tools(tokenizer: Any) -> tuple[str | None, str]:
    forms: tuple[Any, ...] = (_ARGUMENTS, json.dumps(_ARGUMENTS))  # templates differ in which they take
    each = [_answer(tokenizer, _called(arguments), with_tools=True) for arguments in forms]
    shown = [called for called in each if called is not None and "tried value" in called]
    if not shown:
        return None, "its chat template shows no calls"
    said = _answer(tokenizer, {"role": "assistant", "content": _TEXT}) or ""
    best: tuple[Any, str] | None = None
    for name, form in _bound(tokenizer):
        if not form.form.calls:
            continue
        fitting = [one for one in shown if _read(form, one).calls == [(_NAME, _ARGUMENTS)]]
        if not fitting:
            continue
        called = fitting[0]
        found = _read(form, called)
        literal = max((len(head) for one in form.form.calls if (head := _head(one.head)) in called), default=0)
        rank = (-len(found.text), -len(_read(form, said).text), literal)
        if best is None or rank > best[0]:
            best = rank, name
    return (None, "no format reads back the call that its chat template renders") if best is None else (best[1], "")


def _called(arguments: Any) -> dict[str, Any]:
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _head(head: str) -> str:
    """Return a call's literal text before its arguments, for the tried call."""
    return re.sub("«.*?»", "", head).replace("$name", _NAME).replace("$id", _ID)


def _thoughts(tokenizer: Any, tools: str | None) -> tuple[str | None, str]:
    message = {"role": "assistant", "content": _TEXT, "reasoning_content": _THOUGHT}
    answer = _answer(tokenizer, message) or ""
    begun = _prompt(tokenizer, [_USER], add_generation_prompt=True) or ""
    rows = [row for row in _bound(tokenizer) if row[1].form.thought is not None]
    rows.sort(key=lambda row: row[0] != tools)  # the family of the calls first
    found = [(_read(form, answer), name) for name, form in rows]
    fitting = [(one, name) for one, name in found if one.thought == _THOUGHT and _THOUGHT not in one.text]
    if fitting:  # several may know the marks of thoughts, and one of them those of the text
        return min(fitting, key=lambda row: len(row[0].text))[1], ""
    template = str(tokenizer.chat_template)

    def has(*marks: str) -> bool:  # a line break is an escape in a template's text
        return any(mark.strip() in template for mark in marks)

    named = [  # templates of many families leave out the thoughts of earlier turns
        (form.form.text, name)
        for name, form in rows
        if (marks := form.form.thought) is not None
        and ((has(*marks.begin) and has(*marks.end)) or form.after(begun) in ("runs", "over"))
    ]
    if named:
        return min(named, key=lambda row: (row[1] != tools, not has(*row[0].begin)))[1], ""
    return None, "its chat template shows no thoughts that a format reads back"


def _bound(tokenizer: Any) -> Iterator[tuple[str, BoundFormat]]:
    """Yield the rows, each once under its first name, in their order."""
    seen: list[Any] = []
    for name, row in ANSWER_FORMATS.items():
        if not row.variant_of and not any(row is one for one in seen):
            seen.append(row)
            yield name, BoundFormat(variant_of(name, tokenizer), tokenizer)


@dataclass
class _Found:
    """What a reader found."""

    calls: list[tuple[str, Any]]
    thought: str
    text: str


def _read(form: BoundFormat, answer: str) -> _Found:
    """Read a rendered answer, in which each mark that is a token stands for it."""
    spans: list[TokenSpan] = []
    if form.tokens:
        pattern = "|".join(map(re.escape, sorted(form.tokens, key=len, reverse=True)))
        spans = [TokenSpan(found.start(), found.end(), form.tokens[found[0]]) for found in re.finditer(pattern, answer)]
    reader = form.reader(functions=[_FUNCTION], placed=True)
    found, names, arguments = _Found([], "", ""), [], []
    for part in [*reader.push(answer, spans), *reader.finish()]:
        if isinstance(part, CallStart):
            names.append(part.name)
            arguments.append("")
        elif isinstance(part, CallArguments):
            arguments[-1] += part.text
        elif isinstance(part, Content):
            found.text += part.text
        elif isinstance(part, Reasoning):
            found.thought += part.text
    for name, text in zip(names, arguments, strict=True):
        try:
            found.calls.append((name, json.loads(text)))
        except ValueError:
            found.calls.append((name, text))
    found.thought, found.text = found.thought.strip(), found.text.strip()
    return found


def _answer(tokenizer: Any, message: dict[str, Any], *, with_tools: bool = False) -> str | None:
    """Return an answer as the template renders it after the prompt for it; None: it does not.

    What a prompt begins of the answer belongs to it.
    """
    tools = [{"type": "function", "function": _FUNCTION}] if with_tools else None
    whole = _prompt(tokenizer, [_USER, message], add_generation_prompt=False, tools=tools)
    before = _prompt(tokenizer, [_USER], add_generation_prompt=False, tools=tools)
    prompt = _prompt(tokenizer, [_USER], add_generation_prompt=True, tools=tools)
    if whole is None:
        return None
    if prompt is not None and whole.startswith(prompt) and not _begins_thought(prompt):
        return whole[len(prompt) :]
    if before is None:
        return whole
    same = next(
        (i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), min(len(whole), len(before))
    )
    header = _header(before, prompt)
    rest = whole[same:]
    return rest.removeprefix(header)


def _begins_thought(prompt: str) -> bool:
    return any(
        prompt.rstrip().endswith(tuple(map(str.rstrip, (*form.thought.begin, *form.thought.end))))
        for form in ANSWER_FORMATS.values()
        if form.thought is not None
    )


def _header(before: str, prompt: str | None) -> str:
    """Return the text with which a template begins an answer, without marks of thoughts."""
    if prompt is None or not prompt.startswith(before):
        return ""
    header = prompt[len(before) :]
    marks = [
        mark.strip() for form in ANSWER_FORMATS.values() if form.thought is not None for mark in form.thought.begin
    ]
    cuts = [at for mark in marks if (at := header.find(mark)) >= 0]
    return header[: min(cuts)] if cuts else header


def _prompt(
    tokenizer: Any, messages: list[dict[str, Any]], *, add_generation_prompt: bool, tools: Any = None
) -> str | None:
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except Exception:  # a template is a program of the model's
        return None

"""Renders chat templates: Jinja in a sandbox, with the functions and the variables that transformers gives templates.

A template comes with a model, so it is a stranger's program: it sees plain data only and cannot change it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

import numpy as np
from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thoughts in templates and in clients' messages; the first one that has a value counts."""
_END_OF_TEXT = "JPAGED_END_OF_TEXT "
"""Marks where the last message's text ends in a rendered conversation. A template that strips the text takes the space
off, which shows that the text's own trailing spaces are gone as well."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return a conversation as a template renders it.

    Args:
        template: the template's text.
        messages: the conversation; a message's fields without a value are left out.
        tools, documents, add_generation_prompt: variables of the template.
        continue_final_message: cut the result where the last message's text ends.
        variables: further variables, such as the special tokens.

    Raises:
        ValueError: `continue_final_message` has no text to continue, or the template does not render it.
        jinja2.TemplateError: the template is damaged, or raises.
    """
    shown = [_with_thoughts(message, template) for message in _plain(_without_nones(messages))]
    if continue_final_message and "content" not in template:
        raise ValueError("continue_final_message=True: the chat template does not read a message's content")
    text = _mark_end(shown) if continue_final_message else ""
    rendered = _compiled(template).render(
        messages=shown,
        tools=_plain(tools),
        documents=_plain(documents),
        add_generation_prompt=add_generation_prompt,
        **_plain(variables or {}),
    )
    return _cut_at_end(rendered, text) if continue_final_message else rendered


def _without_nones(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _with_thoughts(message: dict[str, Any], template: str) -> dict[str, Any]:
    """Return a message with its thoughts under the names that templates read: GPT-OSS's "thinking" and the usual one,
    as with transformers, and "reasoning" for those that read it, as Gemma's."""
    thoughts = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    if thoughts is None:
        return message
    named = {"reasoning": thoughts} if re.search(r"\breasoning\b", template) else {}
    return {"thinking": thoughts, **named, **message, "reasoning_content": thoughts}


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Put the mark after the text of the last message, in place, and return the text.

    Raises:
        ValueError: there is no text.
    """
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _END_OF_TEXT
        return content
    parts = content if isinstance(content, list | tuple) else ()
    part = next((part for part in reversed(parts) if isinstance(part, dict) and "text" in part), None)
    if part is None:
        raise ValueError("continue_final_message=True needs a last message with a text")
    text: str = part["text"]
    part["text"] = text + _END_OF_TEXT
    return text


def _cut_at_end(rendered: str, text: str) -> str:
    mark = _END_OF_TEXT.strip()
    end = rendered.rfind(mark)
    if end < 0 or text.strip() not in rendered:
        raise ValueError(
            f"continue_final_message=True: the chat template does not show the last message's text, {text!r}"
        )
    return rendered[:end] if rendered[end:].startswith(_END_OF_TEXT) else rendered[:end].rstrip()


def _plain(value: Any) -> Any:
    """Return a copy made of None, numbers, texts, lists, tuples and dicts; of any other object only the type's name.

    The methods of other objects, such as images, would be open to the template.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (str, int, float):  # their subclasses may have methods of their own
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else list(map(_plain, value))
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # a Pydantic model
        return _plain(dump())
    return f"<{type(value).__name__}>"


class _Generation(Extension):
    """The block ``{% generation %}``, which marks the assistant's text for training and changes no rendered text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


class _PublicNamespace(Namespace):
    """A ``namespace()`` whose names do not begin with an underscore, which would reach Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be one of the values
        self, *rest = args
        given = dict(*rest, **values)
        for name in given:
            _check_public(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore, which chat templates may not use")


class _Dict:
    """The function ``dict`` of templates, without the attributes of Python's class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; Jinja's own filter escapes the characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def variables_of(template: str) -> set[str]:
    """Return the variables that a template reads and does not set.

    Raises:
        jinja2.TemplateSyntaxError: the template is damaged.
    """
    sandbox = _sandbox()
    return meta.find_undeclared_variables(sandbox.parse(template)) - sandbox.globals.keys()


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    return _sandbox().from_string(template)


@cache
def _sandbox() -> ImmutableSandboxedEnvironment:
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _PublicNamespace,
    }
    return sandbox

"""Makes an answer format of transformers' `response_template`, which a tokenizer_config.json may have.

Such a template says by literal texts or regular expressions how the fields of a message begin and end. The expressions
that templates need are literal texts with named groups in them, white space, and alternatives; those have a format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.answers.format import AnswerFormat, Calls, Region
from jpaged.answers.notations import Json, Literals, Tagged

RESPONSE_TEMPLATE = "response_template"
"""The name of a model's own template in the place of a row's."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_MOST_TEXTS = 16
"""Literal texts that one expression may stand for."""
_GROUP = re.compile(r"\(\?P<(\w+)>")
_LINES = re.compile(r"\n{2,}")
_TAG = re.compile(r"<(\w+)=\$name>$")
_PLACE = re.compile(r"\{([\w.]+)\}")


def format_of_template(template: Any) -> AnswerFormat:
    """Return the format of a response template.

    Raises:
        ValueError: the template has something that no format has; the message says what.
    """
    if not isinstance(template, Mapping) or not isinstance(template.get("fields"), Mapping):
        raise ValueError("response_template has no fields")
    thought, text, calls = None, Region(), []
    ends: tuple[str, ...] = ()
    for name, field in template["fields"].items():
        if not isinstance(field, Mapping):
            raise ValueError(f"response_template's field {name!r} is no mapping")
        begin, end = (tuple(map(str.strip, _texts(field, anchor))) for anchor in ("open", "close"))
        if name in _THOUGHTS:
            if thought is not None or not begin or not end:
                raise ValueError(f"response_template's field {name!r} is no thought between two marks")
            thought = Region(begin, end, anywhere=bool(field.get("repeats")))
        elif name == "content":
            text, ends = (Region(begin, end), ()) if begin else (Region(), end)
        elif name == "tool_calls":
            calls = _calls(field)
        else:
            raise ValueError(f"response_template has the field {name!r}, which no message has")
    # Between two regions a model begins its message anew, which counts for nothing where all text has marks.
    skipped = tuple(_texts(template, "start_anchor")) if text.begin else ()
    return AnswerFormat(thought, text, tuple(calls), skipped, ends)


def _texts(field: Mapping[str, Any], anchor: str) -> list[str]:
    """Return the literal texts with which a field begins or ends; ``$name`` stands for a named group of that name."""
    given, pattern = field.get(anchor), field.get(f"{anchor}_pattern")
    if pattern is not None:
        texts = (_LINES.sub("\n", text) for text in _Expression(pattern).texts())
        return [text for text in dict.fromkeys(texts) if text.strip()]
    return [given] if isinstance(given, str) else list(given or ())


class _Expression:
    """Reads a regular expression as the literal texts that it stands for, white space as a line break."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def texts(self) -> list[str]:
        found = self._alternatives()
        if self._at < len(self._pattern):
            raise self._error()
        return found

    def _error(self) -> ValueError:
        return ValueError(f"response_template has the expression {self._pattern!r}, which is more than literal texts")

    def _alternatives(self) -> list[str]:
        found, each = list[str](), [""]
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            if self._pattern[self._at] == "|":
                self._at += 1
                found, each = found + each, [""]
                continue
            item = self._item()
            each = [a + b for a in each for b in item]
            if len(each) > _MOST_TEXTS:
                raise self._error()
        return found + each

    def _item(self) -> list[str]:
        """Return the texts of one item and what follows it to say how often it comes."""
        pattern, at = self._pattern, self._at
        if group := _GROUP.match(pattern, at):
            self._skip_group()
            return [f"${group[1]}"]
        if pattern.startswith("(?:", at):
            self._at += 3
            found = self._alternatives()
            self._at += 1
        elif pattern[at] == "\\":
            found = self._escape()
        elif pattern[at] in ".[({*+?":
            raise self._error()
        else:
            self._at += 1
            found = [""] if pattern[at] in "^$" else [pattern[at]]
        often = pattern[self._at : self._at + 1]
        if often and often in "*+?{":
            is_space = all(not text.strip() for text in found)
            if often == "{" or not (is_space or often == "?"):
                raise self._error()
            self._at += 1 + pattern.startswith("?", self._at + 1)
            return ([" "] if often == "+" else found) if is_space else [*found, ""]
        return found

    def _escape(self) -> list[str]:
        letter = self._pattern[self._at + 1 : self._at + 2]
        self._at += 2
        if letter in "sn":
            return ["\n"]
        if letter in "bZAB":
            return [""]
        if not letter or letter.isalnum():
            raise self._error()
        return [letter]

    def _skip_group(self) -> None:
        """Go past a named group, whose own expression does not count."""
        depth, in_class = 0, False
        while self._at < len(self._pattern):
            one = self._pattern[self._at]
            self._at += 2 if one == "\\" else 1
            if in_class:
                in_class = one != "]"
            elif one == "[":
                in_class = True
                self._at += self._pattern[self._at : self._at + 1] == "]"
            elif one in "()":
                depth += 1 if one == "(" else -1
                if not depth:
                    return
        raise self._error()


def _calls(field: Mapping[str, Any]) -> list[Calls]:
    """Return the ways to write calls that a field of calls has: one for each text that it begins with."""
    ends = _texts(field, "close")
    if len(ends) > 1:
        raise ValueError(f"response_template ends calls in several ways, {ends}")
    begins = _texts(field, "open")
    if not begins:
        raise ValueError("response_template has no text before a call")
    return [_one_way(field, begin, ends[0].strip() if ends else "") for begin in begins]


def _one_way(field: Mapping[str, Any], opened: str, end: str) -> Calls:
    head = opened.strip()
    begin, head = _split(head)
    content, options = field.get("content", "text"), field.get("content_args") or {}
    name, arguments = _places(field)
    if not begin or (begin[0] in "{[," and begin[-1] not in ">]"):
        raise ValueError(f"response_template begins a call with {opened!r}, which has no mark")
    if name == "name" and "$name" in head and arguments == "content":
        between = f"\n{begin}{head[: len(head) - len(head.lstrip())]}"
        opening, head = head[: len(head) - len(head.lstrip())], head.lstrip()
        if content == "json":
            notation = _json(options)
            return Calls(begin, f"{head}$arguments", opening, f"{end}{between.strip()}", end, notation)
        if content == "xml-inline":
            tag = _TAG.search(head)  # transformers skips what is no argument, such as the tag that ends this one
            closed = f"«</{tag[1]}>\n»" if tag and f"</{tag[1]}>" not in end else ""
            return Calls(begin, f"{head}\n$arguments{closed}{end}", opening, between, "", _tagged(options))
    elif "$" not in head and content == "json":
        keys = [place.removeprefix("content.") for place in (name, arguments)]
        if field.get("transform_each"):
            call = f'{{"{keys[0]}": "$name", "{keys[1]}": $arguments}}'
            return Calls(begin, call, "[", ", ", f"]{end}", _json(options))
        if name.startswith("content.") and arguments.startswith("content.") and not options.get("string_delims"):
            call = f'{{"{keys[0]}": "$name", "{keys[1]}": $arguments}}'
            return Calls(begin, call, "\n", f"\n{end}\n{begin}\n", f"\n{end}", _json(options))
    elif content == "python-call-list" and (name, arguments) == ("name", "arguments") and "$" not in head:
        return Calls(begin, "$name($arguments)", "[", ", ", f"]{end}", Literals(keywords=True))
    raise ValueError(f"response_template makes calls of {content} in a way that no format has")


def _split(opened: str) -> tuple[str, str]:
    """Return a call's mark, and what follows it up to the arguments."""
    at = min((at for one in "$\n" if (at := opened.find(one)) >= 0), default=len(opened))
    return opened[:at], opened[at:]


def _places(field: Mapping[str, Any]) -> tuple[str, str]:
    """Return where a field's transform finds a call's name and arguments."""
    transform = field.get("transform")
    function = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    if function == "{content}":
        return "content.name", "content.arguments"
    given = [function.get(key) if isinstance(function, Mapping) else None for key in ("name", "arguments")]
    found = [_PLACE.fullmatch(one) if isinstance(one, str) else None for one in given]
    if found[0] is None or found[1] is None:
        raise ValueError(f"response_template makes a call by {transform!r}, which names no name and arguments")
    return found[0][1], found[1][1]


def _json(options: Mapping[str, Any]) -> Json | Literals:
    quotes = options.get("string_delims") or []
    if not quotes and not options.get("unquoted_keys"):
        return Json()
    pairs = tuple((begin, end) for begin, end in quotes) or (('"', '"'),)
    words = ("true", "false", "null")
    return Literals(
        bare_keys=bool(options.get("unquoted_keys")),
        quotes=pairs,
        escapes=not quotes,
        words=words,
        comma=",",
        colon=":",
    )


def _tagged(options: Mapping[str, Any]) -> Tagged:
    texts: Sequence[str] = _Expression(options.get("tag_pattern") or "").texts()
    form = _LINES.sub("\n", texts[0]).replace("$key", "\0").replace("$value", "\1")
    around = re.split("[\0\1]", form.strip())
    if len(texts) > 1 or "$" in form or len(around) != 3 or "" in around or form.index("\0") > form.index("\1"):
        raise ValueError(f"response_template has arguments between the tags {texts}, which is no pair of tags")
    line = "\n" if "\n" in form else ""
    return Tagged(form.strip().replace("\0", "$key").replace("\1", "$value") + line)
